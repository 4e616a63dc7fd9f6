"""What the handlers of the server share: one object, found as `request.app.state.server`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cairn.obs.metrics import Metrics
from cairn.obs.trace import Tracer
from cairn.server.options import ServerOptions
from cairn.specs.media import MediaLimits

if TYPE_CHECKING:
    from cairn.engine.fleet import Engine
    from cairn.engine.tokenizer import Tokenizer
    from cairn.server.grammars import GrammarChecker
    from cairn.server.media import MediaPreparer
    from cairn.server.templates import TemplateRenderer


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The server while it lives. It exists before the model is loaded.

    Attributes:
        options: what the operator decided.
        client: the engine, or its replicas.
        tokenizer: None while loading, and for a model that has none.
        media: reads images and videos; None while loading.
        media_limits: what prompts may bring of them.
        metrics: counters and histograms.
        tracer: makes spans, or none.
        grammars: checks grammars before the engine sees them.
        templates: renders the model's chat template.
        sampling_defaults: sampling parameters of requests that do not say.
        model_name: what clients call the model.
        aliases: further names that clients may call it by.
        loaded: handlers may run; until then the middleware answers 503.
        draining: no new requests; the running ones finish.
        open_requests: requests that the middleware let in and that have not ended.
        started: time.time() at the start, seconds since the epoch.
    """

    options: ServerOptions
    client: Engine
    metrics: Metrics
    grammars: GrammarChecker
    templates: TemplateRenderer
    model_name: str
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    media: MediaPreparer | None = None
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    tracer: Tracer = field(default_factory=Tracer)
    loaded: bool = False
    draining: bool = False
    open_requests: int = 0
    started: float = field(default_factory=time.time)
