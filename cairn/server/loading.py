"""Creates the state of a server, and loads its engine and tokenizer."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from cairn.config import EngineOptions
from cairn.engine.client import EngineClient
from cairn.engine.fleet import Engine, Fleet
from cairn.engine.media.reader import MediaReader
from cairn.engine.recommended import recommended_sampling
from cairn.engine.tokenizer import Tokenizer, load_tokenizer
from cairn.obs.metrics import EngineView, Metrics
from cairn.obs.trace import Tracer
from cairn.server.grammars import GrammarChecker
from cairn.server.media import MediaPreparer
from cairn.server.options import ServerOptions
from cairn.server.state import ServerState
from cairn.server.templates import TemplateRenderer
from cairn.specs.media import resolve_media


def new_state(
    model: Path,
    engine: EngineOptions,
    options: ServerOptions,
    tracer: Tracer,
    listener: int | None = None,
) -> ServerState:
    """The state of a server before its model is loaded; `listener` is passed to its `EngineClient`.

    Raises BadModel for an invalid generation_config.json.
    """
    client = new_client(model, engine, options, listener)
    name, *aliases = options.served_model_names or (model.resolve().name,)
    state = ServerState(
        options=options,
        client=client,
        metrics=Metrics(name, lambda: [view_of(each) for each in client.engines]),
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


def new_client(
    model: Path,
    engine: EngineOptions,
    options: ServerOptions,
    listener: int | None = None,
) -> Engine:
    """The client of an engine, or of `data_parallel_size` replicas, not started."""
    replicas, meeting = options.data_parallel_size, None
    if replicas > 1 and engine.enable_expert_parallel:
        meeting = Path(tempfile.mkdtemp(prefix="cairn-"))

    def make(number: int) -> EngineClient:
        return EngineClient(
            model,
            engine,
            max_waiting=(options.max_waiting + number) // replicas,
            step_limit=options.step_limit,
            replica=(number, replicas),
            meeting=None if meeting is None else str(meeting / "replicas"),
            listener=listener,
        )

    if replicas == 1:
        return make(0)
    return Fleet(make, replicas, options.load_balance_method, engine.seed, meeting)


def view_of(client: EngineClient) -> EngineView:
    """The engine's part of a metrics scrape."""
    if not client.serving:
        return EngineView({}, client.phases)
    totals = {**msgspec.structs.asdict(client.stats), "step_age": client.step_age}
    return EngineView(totals, client.phases)


async def load(state: ServerState, model: Path, on_phase: Callable[[str, float], None]) -> None:
    """Start the engine and read the tokenizer. The caller sets `state.loaded`.

    Args:
        state: the state to fill.
        model: the model folder.
        on_phase: called with the name and the seconds of each phase of the start-up.

    Raises the errors of the engine's start.
    """
    starting = state.client.start(on_phase=on_phase)
    state.tokenizer, _ = await asyncio.gather(_tokenizer(state, model), starting)
    if state.tokenizer is not None:
        state.grammars.open(state.tokenizer, state.client.info.vocab_size)
    info = state.client.info
    reader = MediaReader(info.media, state.media_limits, state.tokenizer)
    state.media = MediaPreparer(reader, info.max_model_len)


def close(state: ServerState) -> None:
    """Stop the worker processes. The engine is stopped through its client."""
    state.grammars.close()
    state.templates.close()
    if state.media is not None:
        state.media.close()


async def _tokenizer(state: ServerState, model: Path) -> Tokenizer | None:
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    if tokenizer is not None and tokenizer.has_chat_template:
        await state.templates.open()
    return tokenizer
