"""Prometheus metrics, with vLLM's names after the prefix `cairn:`.

Counters of the engine are read from its last heartbeat at each scrape. Latencies (first token, time
per token, whole request) are measured where responses leave the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TOKEN_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 2.5, 10.0),
)
"""Histogram bounds of the time per token, in seconds."""
REQUEST_SECONDS = (
    *(0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Histogram bounds of the times of a request, in seconds."""

GAUGES = {
    "num_requests_running": ("running", "Continuations that run."),
    "num_requests_waiting": ("waiting", "Continuations that wait for a row or for pages."),
    "pages_total": ("pages_total", "Pages of the pool."),
    "pages_free": ("pages_free", "Pages that hold nothing."),
    "pages_cached": (
        "pages_cached",
        "Pages that only the prefix cache holds; they can be evicted.",
    ),
    "window_pages_total": (
        "window_pages_total",
        "Pages of the pool of layers that see a window alone; 0: they share all pages.",
    ),
    "window_pages_free": ("window_pages_free", "Those of them that hold nothing."),
    "window_pages_cached": (
        "window_pages_cached",
        "Those of them that only the prefix cache holds; they can be evicted.",
    ),
    "host_pages_total": ("host_pages_total", "Places for pages in host memory."),
    "host_pages_kept": ("host_pages_kept", "Pages in host memory."),
    "leaked_pages": ("pages_leaked", "Pages that nobody owns; anything but 0 is a bug."),
    "step_age_seconds": ("step_age", "Seconds since the engine's step in flight began."),
}
"""Name of a gauge -> (key of the engine's totals, help text)."""

COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens taken from the prefix cache."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of all requests."),
    "generation_tokens": ("generated_tokens", "Tokens that were sampled."),
    "num_preemptions": ("preemptions", "Requests whose pages were taken back for a while."),
    "host_records_stored": (
        "host_records_stored",
        "Records of pages, window pages and states that were moved into host memory.",
    ),
    "host_records_loaded": ("host_records_loaded", "Those that were moved back to the device."),
    "host_records_damaged": (
        "host_records_damaged",
        "Those whose bytes had changed; what they held was computed again.",
    ),
    "spec_decode_num_drafts": ("draft_runs", "Times that a row ran guesses of next tokens."),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "Guesses that ran."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Guesses that were right."),
    "engine_steps": ("steps", "Forward passes."),
    "model_seconds": ("model_seconds", "Seconds inside the model and the sampler."),
    "host_seconds": ("host_seconds", "Seconds of the steps beside the model."),
    "decode_stall_seconds": (
        "decode_stall_seconds",
        "Seconds that rows which decode waited for prefill of others in their step.",
    ),
    "landmark_queries": ("selecting_queries", "Queries of layers that select pages."),
    "selected_pages": ("pages_selected", "Pages that those queries selected."),
    "frame_hits": ("frame_hits", "Selected pages of a head that were in frames on the device."),
    "frame_misses": ("frame_misses", "Those that were fetched from host memory."),
    "frame_bytes": ("frame_bytes", "Bytes that were fetched."),
}
"""Name of a counter, without _total -> (key of the engine's totals, help text)."""

BY_REASON = {
    "kv_load_failures": (
        "load_failures",
        "Requests whose pages did not all come from the engine that prefilled.",
    ),
}
"""Likewise, where the totals have a count for each reason."""


def _usage(totals: Mapping[str, float]) -> float:
    used = totals["pages_total"] - totals["pages_free"] - totals["pages_cached"]
    return used / (totals["pages_total"] or 1)


SHARES: dict[str, tuple[Callable[[Mapping[str, float]], float], str]] = {
    "kv_cache_usage_perc": (_usage, "Share of the pages in use, 0 to 1."),
    "spec_decode_accepted_length": (
        lambda totals: totals["accepted_tokens"] / (totals["draft_runs"] or 1),
        "Right guesses, mean of runs.",
    ),
    "selected_pages_per_query": (
        lambda totals: totals["pages_selected"] / (totals["selecting_queries"] or 1),
        "Mean over all landmark queries.",
    ),
}
"""Name of a gauge -> (function of the engine's totals, help text)."""


class EngineView(NamedTuple):
    """Values of an engine at a scrape.

    Attributes:
        totals: totals by name, and `step_age`; empty while the engine does not serve.
        phases: seconds of each phase of the start-up.
    """

    totals: Mapping[str, Any]
    phases: Mapping[str, float]


EngineViews = Callable[[], Sequence[EngineView]]
"""Returns the values of every replica."""


class RequestTiming(Protocol):
    """Phases of a request in seconds, measured by the engine."""

    @property
    def queue(self) -> float:
        """From arrival to its first step."""
        ...

    @property
    def prefill(self) -> float:
        """From its first step to its first token."""
        ...

    @property
    def decode(self) -> float:
        """From its first token to its last."""
        ...


class Progress(Protocol):
    """The fields of `cairn.engine.messages.Delta` that metrics read."""

    @property
    def id(self) -> str:
        """Id of the request."""
        ...

    @property
    def index(self) -> int:
        """Index of the output."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """New tokens."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Set in the last delta."""
        ...

    @property
    def timing(self) -> RequestTiming | None:
        """Set in the last delta."""
        ...


class Metrics:
    """All metrics of a server, in a separate registry.

    Args:
        model_name: value of the label `model_name`.
        engines: called at every scrape.
    """

    def __init__(self, model_name: str, engines: EngineViews) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(model_name, engines))

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"cairn:{name}", text, ["model_name"], registry=self.registry, buckets=bounds
            )
            return made.labels(model_name)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cairn:{name}", text, ["model_name", *labels], registry=self.registry)

        self.model_name = model_name
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", REQUEST_SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two tokens of an output.", TOKEN_SECONDS
        )
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_SECONDS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "Waiting for the first step.", REQUEST_SECONDS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_SECONDS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "First token to last token.", REQUEST_SECONDS
        )
        self._finished = counter("request_success", "Outputs that ended.", "finished_reason")
        self._aborts = counter("num_aborts", "Requests whose client went away.", "endpoint")
        self._http = counter("http_requests", "Answers.", "endpoint", "method", "status")

    def track(self, endpoint: str) -> Track:
        """Start to measure an HTTP request, at its arrival."""
        return Track(self, endpoint)

    def finished(self, reason: str) -> None:
        """Count a finished output."""
        self._finished.labels(self.model_name, reason).inc()

    def aborted(self, endpoint: str) -> None:
        """Count a request whose client has disconnected."""
        self._aborts.labels(self.model_name, endpoint).inc()

    def answered(self, endpoint: str, method: str, status: int) -> None:
        """Count an HTTP response. `endpoint` is the path pattern of a route."""
        self._http.labels(self.model_name, endpoint, method, str(status)).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Track:
    """Measures one HTTP request: TTFT, time per token, outcome. A context manager.

    A request that has not ended at exit counts as aborted, or as an error after an exception.
    """

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._arrival = time.perf_counter()
        self._last: dict[tuple[str, int], float] = {}
        self._ended = False

    def delta(self, delta: Progress) -> None:
        """Record new tokens of an output."""
        metrics, now = self._metrics, time.perf_counter()
        if delta.token_ids:
            key = (delta.id, delta.index)
            last = self._last.get(key)
            if last is None:
                metrics.time_to_first_token.observe(now - self._arrival)
            else:
                pace = (now - last) / len(delta.token_ids)
                for _ in delta.token_ids:
                    metrics.inter_token.observe(pace)
            self._last[key] = now
        if delta.finish_reason is not None:
            metrics.finished(delta.finish_reason)
            if delta.timing is not None:
                metrics.queue_time.observe(delta.timing.queue)
                metrics.prefill_time.observe(delta.timing.prefill)
                metrics.decode_time.observe(delta.timing.decode)

    def end(self, reason: str = "done") -> None:
        """End the request. Further calls have no effect.

        Args:
            reason: "done" (its time is recorded), "abort" (client disconnected) or "error".
        """
        if self._ended:
            return
        self._ended = True
        if reason == "abort":
            self._metrics.aborted(self._endpoint)
        elif reason == "done":
            self._metrics.end_to_end.observe(time.perf_counter() - self._arrival)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # CancelledError (the client has disconnected) is not a subclass of Exception.
        self.end("error" if isinstance(error, Exception) else "abort")


class _EngineCollector(Collector):
    """Builds the metrics of the engines' totals at every scrape, with the label `replica`."""

    def __init__(self, model_name: str, engines: EngineViews) -> None:
        self._model_name = model_name
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the registry."""
        engines = self._engines()
        seconds = self._gauge("startup_seconds", "Start-up time.", "phase")
        up = self._gauge("replica_up", "1: the replica serves.")
        for replica, engine in enumerate(engines):
            for phase, took in engine.phases.items():
                seconds.add_metric((self._model_name, str(replica), phase), took)
            up.add_metric((self._model_name, str(replica)), bool(engine.totals))
        yield from (seconds, up)
        totals = {i: engine.totals for i, engine in enumerate(engines) if engine.totals}
        for name, (key, text) in GAUGES.items():
            yield self._filled(self._gauge(name, text), {i: t[key] for i, t in totals.items()})
        for name, (share, text) in SHARES.items():
            yield self._filled(self._gauge(name, text), {i: share(t) for i, t in totals.items()})
        for name, (key, text) in COUNTERS.items():
            family = CounterMetricFamily(f"cairn:{name}", text, labels=("model_name", "replica"))
            yield self._filled(family, {i: t[key] for i, t in totals.items()})
        for name, (key, text) in BY_REASON.items():
            labels = "model_name", "replica", "reason"
            family = CounterMetricFamily(f"cairn:{name}", text, labels=labels)
            for i, t in totals.items():
                for reason, count in t[key].items():
                    family.add_metric((self._model_name, str(i), reason), count)
            yield family

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"cairn:{name}", text, labels=("model_name", "replica", *labels))

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[int, float]
    ) -> Metric:
        for replica, value in values.items():
            family.add_metric((self._model_name, str(replica)), value)
        return family
