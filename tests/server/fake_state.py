"""A server's state without an engine, and a client for ASGI applications."""

import asyncio
from types import SimpleNamespace

import httpx

from cairn.engine.messages import Stats
from cairn.obs.metrics import Metrics
from cairn.server.loading import view_of
from cairn.server.options import ServerOptions
from cairn.server.state import ServerState


def fake_state(**options):
    """A loaded server whose engine is a simple object; set its fields as needed."""
    client = SimpleNamespace(
        dead=None, down={}, serving=True, step_age=0.0, phases={"weights": 1.5}, stats=Stats()
    )
    return ServerState(
        options=ServerOptions(**options),
        client=client,
        metrics=Metrics("tiny", lambda: [view_of(client)]),
        grammars=None,
        templates=None,
        model_name="tiny",
        loaded=True,
    )


def ask(app, method, path, **arguments):
    """Send one request to an ASGI application."""

    async def call():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(call())
