"""The operator's routes, on a port of their own that only this machine reaches.

Of replicas an answer is an object with that of each, by its number.
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
        seconds: the recording ends after this time, whatever has run.
    """

    steps: int = 10
    seconds: float = 60.0


async def flush_cache(request: Request) -> Response:
    """POST /admin/flush_cache: forget every cached prefix that nothing uses."""
    _refuse_browsers(request)
    return await _asked(request, "flush_cache")


async def cache(request: Request) -> Response:
    """GET /admin/cache: the ledger of pages; `problems` is empty when each is in one hand."""
    return await _asked(request, "cache")


async def profile(request: Request) -> Response:
    """POST /admin/profile: where the next steps spend their time.

    Answers when they have run: a table of the ops that took longest, and `trace`, a gzipped
    Chrome trace in base64.
    """
    _refuse_browsers(request)
    body = await request.body()
    try:
        wanted = msgspec.json.decode(body or b"{}", type=ProfileRequest)
    except msgspec.DecodeError as error:
        raise HTTPException(400, str(error)) from None
    return await _asked(request, "profile", steps=wanted.steps, seconds=wanted.seconds)


def create_admin_app(state: ServerState) -> Starlette:
    """The admin routes as an app; `middleware.wrap` goes around it like around the API's."""
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.server = state
    return app


async def _asked(request: Request, method: str, **arguments: Any) -> Response:
    """The engine's answer, with bytes in base64."""
    state: ServerState = request.app.state.server
    found = await state.client.call(method, **arguments)
    return Response(msgspec.json.encode(found), media_type="application/json")


def _refuse_browsers(request: Request) -> None:
    """Requests with an Origin header are refused: no web page may use the admin routes."""
    if "origin" in request.headers:
        raise HTTPException(403, "admin routes do not answer pages in a browser")


routes = [
    Route("/admin/flush_cache", flush_cache, methods=["POST"]),
    Route("/admin/cache", cache, methods=["GET"]),
    Route("/admin/profile", profile, methods=["POST"]),
]
