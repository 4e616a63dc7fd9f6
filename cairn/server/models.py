"""/v1/models: what is served."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.server.errors import NotFound
from cairn.server.protocol.tokens import ModelCard, ModelFacts, ModelList
from cairn.server.state import ServerState


def check_model(state: ServerState, name: str | None) -> None:
    """Raise NotFound unless the request names the served model, or none: some clients write ""
    where nobody chose one."""
    if name and name not in (state.model_name, *state.aliases):
        error = NotFound(f"the model {name!r} is not served", f"Use {state.model_name!r}")
        error.param = "model"
        raise error


def card(state: ServerState, name: str | None = None) -> ModelCard:
    """The served model under one of its names; None: the first."""
    info = state.client.info
    facts = ModelFacts(
        page_size=info.page_size,
        landmarks=info.landmarks,
        landmark_layers=info.selecting_layers,
        landmark_window=info.selecting_window,
        max_selection_tokens=state.options.max_selection_tokens,
        chat_template=state.tokenizer is not None and state.tokenizer.chat_template is not None,
        images=info.media is not None,
    )
    return ModelCard(
        id=name or state.model_name,
        created=int(state.started),
        max_model_len=info.max_model_len,
        cairn=facts,
    )


async def list_models(request: Request) -> Response:
    """GET /v1/models: a card for each name."""
    state: ServerState = request.app.state.server
    body = ModelList(data=[card(state, name) for name in (state.model_name, *state.aliases)])
    return Response(msgspec.json.encode(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """GET /v1/models/NAME; 404 for a name that is not served."""
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    check_model(state, name)
    return Response(msgspec.json.encode(card(state, name)), media_type="application/json")


routes = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
