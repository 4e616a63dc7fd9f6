"""The admin routes, on a separate port that listens on loopback.

With replicas, a response maps each replica's index to its result.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.server.errors import HANDLERS
from cairn.server.protocol.fields import Fields
from cairn.server.state import ServerState


class ProfileRequest(Fields):
    """Body of POST /admin/profile.

    Attributes:
        steps: forward passes to record.
        seconds: time limit of the recording.
    """

    steps: int = 10
    seconds: float = 60.0


async def flush_cache(request: Request) -> Response:
    """POST /admin/flush_cache: drop every cached prefix that no request uses."""
    _refuse_browsers(request)
    return await _asked(request, "flush_cache")


async def cache(request: Request) -> Response:
    """GET /admin/cache: owners of all pages. `problems` lists pages with no owner or with two."""
    return await _asked(request, "cache")


async def profile(request: Request) -> Response:
    """POST /admin/profile: profile the next steps.

    The response comes when they have run: a table of the slowest ops, and `trace`, a gzipped Chrome
    trace in base64.
    """
    _refuse_browsers(request)
    body = await request.body()
    try:
        wanted = msgspec.json.decode(body or b"{}", type=ProfileRequest)
    except msgspec.DecodeError as error:
        raise HTTPException(400, str(error)) from None
    return await _asked(request, "profile", steps=wanted.steps, seconds=wanted.seconds)


def create_admin_app(state: ServerState) -> Starlette:
    """The admin routes as an application, to be wrapped by `middleware.wrap` like the API."""
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.server = state
    return app


async def _asked(request: Request, method: str, **arguments: Any) -> Response:
    """Call a method of the engine and return its result as JSON, bytes in base64."""
    state: ServerState = request.app.state.server
    found = await state.client.call(method, **arguments)
    return Response(msgspec.json.encode(found), media_type="application/json")


def _refuse_browsers(request: Request) -> None:
    """Refuse requests with an Origin header, so that no web page can use the admin routes."""
    if "origin" in request.headers:
        raise HTTPException(403, "admin routes do not answer pages in a browser")


routes = [
    Route("/admin/flush_cache", flush_cache, methods=["POST"]),
    Route("/admin/cache", cache, methods=["GET"]),
    Route("/admin/profile", profile, methods=["POST"]),
]
