"""/health, /ready and /metrics, for load balancers and monitoring."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cairn.obs.metrics import CONTENT_TYPE
from cairn.server.state import ServerState

UNAVAILABLE = 503


def not_ready(state: ServerState) -> str | None:
    """Why the server is not ready for new requests; None if it is."""
    if state.client.dead is not None:
        return f"the engine has ended: {state.client.dead}"
    if state.draining:
        return "the server is shutting down"
    if not state.loaded:
        return "the model is loading"
    age = state.client.step_age
    limit = state.options.ready_step_age
    if age > limit:
        return f"the engine's step takes {age:.1f} s, more than {limit:g} s"
    return None


async def health(request: Request) -> Response:
    """GET /health: 200 while the engine runs, or at least one replica; else 503. Replicas that do
    not serve are listed."""
    state: ServerState = request.app.state.server
    if state.client.dead is not None:
        return JSONResponse({"status": "dead", "reason": str(state.client.dead)}, UNAVAILABLE)
    body = {"status": "ok", "uptime_seconds": round(time.time() - state.started, 1)}
    if state.client.down:
        body["replicas_down"] = {str(n): why.message for n, why in state.client.down.items()}
    return JSONResponse(body)


async def ready(request: Request) -> Response:
    """GET /ready: 200 if the server takes new requests, else 503 with the reason."""
    reason = not_ready(request.app.state.server)
    if reason is not None:
        return JSONResponse({"ready": False, "reason": reason}, UNAVAILABLE)
    return JSONResponse({"ready": True})


async def metrics(request: Request) -> Response:
    """GET /metrics: all metrics in Prometheus' text format."""
    state: ServerState = request.app.state.server
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)


routes = [
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
