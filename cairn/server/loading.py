"""A server's state from a model folder: made at once, loaded while the engine starts."""

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
    """The state of a server that has loaded nothing yet; `listener` is for its `EngineClient`.

    Raises BadModel for a generation_config.json that cannot be read.
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
    """An engine that has not been started, or as many replicas as the options say."""
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
    """What metrics show of an engine."""
    if not client.serving:
        return EngineView({}, client.phases)
    totals = {**msgspec.structs.asdict(client.stats), "step_age": client.step_age}
    return EngineView(totals, client.phases)


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
