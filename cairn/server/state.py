"""The state that all request handlers share, as `request.app.state.server`."""

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
    """State of a server. It exists before the model is loaded.

    Attributes:
        options: options of the server.
        client: client of the engine, or of its replicas.
        tokenizer: None while loading, and for a model without one.
        media: decodes images and videos; None while loading.
        media_limits: limits of images and videos per prompt.
        metrics: Prometheus metrics.
        tracer: creates trace spans.
        grammars: checks grammars before the engine compiles them.
        templates: renders the model's chat template.
        sampling_defaults: sampling parameters that requests leave out.
        model_name: name of the model in the API.
        aliases: further names of the model.
        loaded: the model is loaded; until then the middleware returns 503.
        draining: the server shuts down: running requests finish, new ones get 503.
        open_requests: number of requests in handlers.
        started: start time, seconds since the epoch.
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
