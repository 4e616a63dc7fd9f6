"""The API's routes and handlers put together; this imports no torch."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from cairn.server import (
    chat,
    completions,
    health,
    messages,
    models,
    openapi,
    page,
    responses,
    tokenization,
)
from cairn.server.errors import HANDLERS
from cairn.server.hosts import HostCheck
from cairn.server.middleware import ANY_HOST, wrap
from cairn.server.state import ServerState

routes: list[Route] = [
    *chat.routes,
    *completions.routes,
    *messages.routes,
    *responses.routes,
    *models.routes,
    *tokenization.routes,
    *openapi.routes,
    *health.routes,
    *page.routes,
]


def create_app(state: ServerState, hosts: HostCheck = ANY_HOST) -> ASGIApp:
    """The whole API as one ASGI application; all handlers share `state`."""
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.server = state
    return wrap(app, state, hosts, state.options.allowed_origins)
