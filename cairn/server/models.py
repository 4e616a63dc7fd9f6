"""/v1/models: the served model."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.server.errors import NotFound
from cairn.server.protocol.tokens import ModelCard, ModelFacts, ModelList
from cairn.server.state import ServerState


def check_model(state: ServerState, name: str | None) -> None:
    """Raise NotFound if `name` is not the served model. None and "" are accepted: some clients send
    an empty name by default."""
    if name and name not in (state.model_name, *state.aliases):
        error = NotFound(f"the model {name!r} is not served", f"Use {state.model_name!r}")
        error.param = "model"
        raise error


def card(state: ServerState, name: str | None = None) -> ModelCard:
    """The description of the served model, under `name` or its first name."""
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
    """GET /v1/models: one entry for each name of the served model."""
    state: ServerState = request.app.state.server
    body = ModelList(data=[card(state, name) for name in (state.model_name, *state.aliases)])
    return Response(msgspec.json.encode(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """GET /v1/models/NAME. Raises NotFound for a name that is not served."""
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    check_model(state, name)
    return Response(msgspec.json.encode(card(state, name)), media_type="application/json")


routes = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
