"""Report of a load: rates, latencies and errors, as a record and as a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cairn.bench.serve.exchange import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2e": "end to end (E2E)",
    "held_back": "held back by --max-concurrency",
}
"""Field of a report -> how it is shown."""

WORTH_SHOWING_MS = 10.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds of many events."""

    count: int
    mean: float
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Spread | None:
        """Spread of the known values; None if there are none."""
        values = np.array([x for x in seconds if x is not None], dtype=np.float64) * 1e3
        if not len(values):
            return None
        median, p99 = np.percentile(values, (50, 99))
        return cls(
            len(values),
            round(float(values.mean()), 3),
            round(float(median), 3),
            round(float(p99), 3),
            round(float(values.max()), 3),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a load. Rates and latencies are of the requests that completed.

    Attributes:
        seconds: from the first request sent to the last byte.
        completed, aborted, failed: requests.
        errors: kind -> requests.
        examples: kind -> text of its first failure.
        input_tokens, output_tokens: in all.
        requests_per_s, input_tokens_per_s, output_tokens_per_s, tokens_per_s: over `seconds`.
        ttft, tpot, itl, e2e: latencies.
        held_back: what requests waited for their place under the largest concurrency.
        cached_tokens: prompt tokens from the prefix cache, None where the server does not say.
        counted: token counts come from the server's usage; else some are estimates.
    """

    seconds: float
    completed: int
    aborted: int
    failed: int
    errors: dict[str, int]
    examples: dict[str, str]
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    held_back: Spread | None
    cached_tokens: int | None
    counted: bool

    def fields(self) -> dict[str, object]:
        """As a JSON object; the latencies' names end in _ms."""
        found: dict[str, object] = {}
        for name, value in dataclasses.asdict(self).items():
            key = f"{name}_ms" if name in LATENCIES else name
            found[key] = round(value, 3) if isinstance(value, float) else value
        return found


def summarize(outcomes: Sequence[Outcome]) -> Report:
    """Report of the ended requests."""
    done = [x for x in outcomes if x.complete]
    failed = [x for x in outcomes if x.error is not None]
    seconds = 0.0
    if outcomes:
        seconds = max(x.ended for x in outcomes) - min(x.sent for x in outcomes)
    examples: dict[str, str] = {}
    for outcome in failed:
        examples.setdefault(str(outcome.error), outcome.detail)
    inputs, outputs = sum(x.input_tokens for x in done), sum(x.output_tokens for x in done)
    cached = [x.cached_tokens for x in done if x.cached_tokens is not None]
    rate = 1.0 / seconds if seconds > 0 else 0.0
    return Report(
        seconds=seconds,
        completed=len(done),
        aborted=sum(x.aborted and x.error is None for x in outcomes),
        failed=len(failed),
        errors=dict(Counter(str(x.error) for x in failed).most_common()),
        examples=examples,
        input_tokens=inputs,
        output_tokens=outputs,
        requests_per_s=len(done) * rate,
        input_tokens_per_s=inputs * rate,
        output_tokens_per_s=outputs * rate,
        tokens_per_s=(inputs + outputs) * rate,
        ttft=Spread.of(x.ttft for x in done),
        tpot=Spread.of(x.tpot for x in done),
        itl=Spread.of(gap for x in done for gap in x.gaps),
        e2e=Spread.of(x.e2e for x in done),
        held_back=Spread.of(max(0.0, x.sent - x.due) for x in done),
        cached_tokens=sum(cached) if cached else None,
        counted=all(x.counted for x in done),
    )


def render(report: Report, title: str) -> RenderableType:
    """The report for a terminal."""
    from rich.console import Group
    from rich.table import Table

    parts: list[RenderableType] = [title, "", _rates(report)]
    latencies = Table(box=None, pad_edge=False)
    latencies.add_column("milliseconds")
    for column in ("mean", "median", "p99", "max"):
        latencies.add_column(column, justify="right")
    for field, name in LATENCIES.items():
        spread = getattr(report, field)
        hidden = field == "held_back" and spread is not None and spread.mean < WORTH_SHOWING_MS
        if spread is not None and not hidden:
            latencies.add_row(name, *_numbers(spread))
    parts += ["", latencies]
    if report.errors:
        errors = Table("errors", "requests", "first of them", box=None, pad_edge=False)
        for kind, count in report.errors.items():
            errors.add_row(kind, str(count), report.examples[kind])
        parts += ["", errors]
    return Group(*parts)


def _rates(report: Report) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    counts = f"{report.completed} completed"
    for name in ("aborted", "failed"):
        if getattr(report, name):
            counts += f", {getattr(report, name)} {name}"
    mark = "" if report.counted else "  (estimated: the server sends no usage)"
    table.add_row("requests", counts)
    table.add_row("seconds", f"{report.seconds:,.2f}")
    table.add_row("input tokens", f"{report.input_tokens:,}{mark}")
    if report.cached_tokens is not None:
        table.add_row("  from the prefix cache", f"{report.cached_tokens:,}")
    table.add_row("output tokens", f"{report.output_tokens:,}{mark}")
    table.add_row("requests/s", f"{report.requests_per_s:,.2f}")
    table.add_row("input tokens/s", f"{report.input_tokens_per_s:,.1f}")
    table.add_row("output tokens/s", f"{report.output_tokens_per_s:,.1f}")
    table.add_row("total tokens/s", f"{report.tokens_per_s:,.1f}")
    return table


def _numbers(spread: Spread) -> tuple[str, ...]:
    values = (spread.mean, spread.median, spread.p99, spread.max)
    return tuple(f"{value:,.2f}" for value in values)
