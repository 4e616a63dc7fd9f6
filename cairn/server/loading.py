"""A server's state from a model folder: made at once, loaded while the engine starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from cairn.config import EngineOptions
from cairn.engine.client import EngineClient
from cairn.engine.media.reader import MediaReader
from cairn.engine.recommended import recommended_sampling
from cairn.engine.tokenizer import Tokenizer, load_tokenizer
from cairn.obs.metrics import Metrics
from cairn.obs.trace import Tracer
from cairn.server.grammars import GrammarChecker
from cairn.server.media import MediaPreparer
from cairn.server.options import ServerOptions
from cairn.server.state import ServerState
from cairn.server.templates import TemplateRenderer
from cairn.specs.media import resolve_media


def new_state(
    model: Path, engine: EngineOptions, options: ServerOptions, tracer: Tracer
) -> ServerState:
    """The state of a server that has loaded nothing yet.

    Raises BadModel for a generation_config.json that cannot be read.
    """
    client = EngineClient(
        model, engine, max_waiting=options.max_waiting, step_limit=options.step_limit
    )
    name, *aliases = options.served_model_names or (model.resolve().name,)

    def totals() -> Mapping[str, float]:
        if not state.loaded:
            return {}
        return {**msgspec.structs.asdict(client.stats), "step_age": client.step_age}

    state = ServerState(
        options=options,
        client=client,
        metrics=Metrics(name, totals, lambda: client.phases),
        grammars=GrammarChecker(),
        media_limits=resolve_media(engine),
        templates=TemplateRenderer(),
        tracer=tracer,
        model_name=name,
        aliases=tuple(aliases),
    )
    if options.sampling_defaults == "model":
        state.sampling_defaults = recommended_sampling(model)
    return state


async def load(state: ServerState, model: Path, on_phase: Callable[[str, float], None]) -> None:
    """Start the engine and read the tokenizer. `state.loaded` is left to the caller.

    Raises what the engine's start raises.
    """
    starting = state.client.start(on_phase=on_phase)
    state.tokenizer, _ = await asyncio.gather(_tokenizer(state, model), starting)
    if state.tokenizer is not None:
        state.grammars.open(state.tokenizer, state.client.info.vocab_size)
    info = state.client.info
    reader = MediaReader(info.media, state.media_limits, state.tokenizer)
    state.media = MediaPreparer(reader, info.max_model_len)


def close(state: ServerState) -> None:
    """End the workers. The engine is stopped by its client."""
    state.grammars.close()
    state.templates.close()
    if state.media is not None:
        state.media.close()


async def _tokenizer(state: ServerState, model: Path) -> Tokenizer | None:
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    if tokenizer is not None and tokenizer.has_chat_template:
        await state.templates.open()
    return tokenizer
