"""Optional trace spans through OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.errors import BadConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.trace import Tracer as OtelTracer

Attribute = str | int | float | bool
PROCESS_PROVIDER = "otel"


class Span:
    """A request's span, with attributes under OpenTelemetry's names."""

    def __init__(self) -> None:
        self.attributes: dict[str, Attribute] = {}
        self.failed = False


class Tracer:
    """Creates spans.

    Args:
        target: "otel" for the OpenTelemetry provider of the process (as set up by
            `opentelemetry-instrument`), None to disable spans, or the name of a file that gets one
            JSON object per line.

    Raises:
        BadConfig: OpenTelemetry is not installed, or the file cannot be written.
    """

    def __init__(self, target: str | None = None) -> None:
        self._provider: TracerProvider | None = None
        self._tracer: OtelTracer | None = None
        if target is None:
            return
        try:
            from opentelemetry import trace

            if target != PROCESS_PROVIDER:
                self._provider = _file_provider(Path(target))
        except ImportError:
            raise BadConfig(
                f"trace is {target!r}, but OpenTelemetry is not installed",
                "pip install 'cairn-llm[trace]'",
            ) from None
        self._tracer = trace.get_tracer("cairn", tracer_provider=self._provider)

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """Context manager: a span of one request.

        Args:
            name: name of the span.
            headers: headers of the request. `traceparent` names the parent span.
        """
        gathered = Span()
        if self._tracer is None:
            yield gathered
            return
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, StatusCode

        with self._tracer.start_as_current_span(
            name, context=propagate.extract(headers), kind=SpanKind.SERVER
        ) as span:
            try:
                yield gathered
            finally:
                span.set_attributes(gathered.attributes)
                if gathered.failed:
                    span.set_status(StatusCode.ERROR)

    def close(self) -> None:
        """Flush pending spans."""
        if self._provider is not None:
            self._provider.shutdown()


def _file_provider(path: Path) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    def line(span: ReadableSpan) -> str:
        return f"{span.to_json(indent=None)}\n"

    try:
        out = path.open("a", encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"trace file {path} cannot be written: {error.strerror}") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "cairn"}))
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=out, formatter=line)))
    return provider
