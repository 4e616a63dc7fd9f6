"""The ASGI application of the API. Imports no torch."""

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
from cairn.server.host_header import HostCheck
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
    """The API with its middleware as one ASGI application.

    Args:
        state: shared by all handlers.
        hosts: check of the Host header.
    """
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.server = state
    return wrap(app, state, hosts, state.options.allowed_origins)
