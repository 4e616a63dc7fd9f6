"""A server's state without an engine, and a client for ASGI apps."""

import asyncio
from types import SimpleNamespace

import httpx
import msgspec

from cairn.engine.messages import Stats
from cairn.obs.metrics import Metrics
from cairn.server.options import ServerOptions
from cairn.server.state import ServerState


def fake_state(**options):
    """A loaded server whose engine is a plain object; set its fields as needed."""
    client = SimpleNamespace(dead=None, step_age=0.0, phases={"weights": 1.5}, stats=Stats())

    def totals():
        return {**msgspec.structs.asdict(client.stats), "step_age": client.step_age}

    return ServerState(
        options=ServerOptions(**options),
        client=client,
        metrics=Metrics("tiny", totals, lambda: client.phases),
        grammars=None,
        templates=None,
        model_name="tiny",
        loaded=True,
    )


def ask(app, method, path, **arguments):
    """One request to an ASGI app."""

    async def call():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(call())
