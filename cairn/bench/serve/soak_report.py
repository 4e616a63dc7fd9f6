"""Report of a soak: requests by kind, and the trend of each server process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cairn.bench.serve.exchange import Outcome
from cairn.bench.serve.processes import ProcessState
from cairn.bench.serve.report import Spread

MB = 1e6
HOUR = 3600.0
POINTS = 200
FEWEST_FOR_A_SLOPE = 5

GAUGES = {
    "leaked_pages": "cairn:leaked_pages",
    "running": "cairn:num_requests_running",
    "waiting": "cairn:num_requests_waiting",
}
"""Name in the record -> metric of the server."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment: seconds since the load began, processes by pid, gauges by name."""

    at: float
    processes: dict[int, ProcessState]
    gauges: dict[str, float]


@dataclass(slots=True)
class Tally:
    """Counts of ended requests, so that outcomes need not be kept for hours.

    Attributes:
        sent, completed, aborted: kind of request -> requests.
        errors: kind of failure -> requests.
        examples: kind of failure -> text of its first.
        output_tokens: of the completed ones.
        ttft: seconds of each completed stream.
    """

    sent: Counter[str] = field(default_factory=Counter)
    completed: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    output_tokens: int = 0
    ttft: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count an ended request."""
        self.sent[outcome.kind] += 1
        if outcome.error is not None:
            self.errors[outcome.error] += 1
            self.examples.setdefault(outcome.error, outcome.detail)
        elif outcome.aborted:
            self.aborted[outcome.kind] += 1
        else:
            self.completed[outcome.kind] += 1
            self.output_tokens += outcome.output_tokens
            if outcome.ttft is not None:
                self.ttft.append(outcome.ttft)


@dataclass(frozen=True, slots=True)
class ProcessTrend:
    """Trend of a process over the soak, without the warm-up.

    Attributes:
        pid, command: the process.
        rss_mb_per_hour: slope of resident memory; None for too few samples.
        rss_mb: first and last.
        fds_under_load: fewest and most open descriptors.
        fds_at_rest: before and after the load, the server idle; None where it did not run.
    """

    pid: int
    command: str
    rss_mb_per_hour: float | None
    rss_mb: tuple[float, float] | None
    fds_under_load: tuple[int, int] | None
    fds_at_rest: tuple[int | None, ...]

    def __str__(self) -> str:
        slope = "too short" if self.rss_mb_per_hour is None else f"{self.rss_mb_per_hour:+.2f} MB/h"
        rss = "-" if self.rss_mb is None else f"{self.rss_mb[0]:,.1f} -> {self.rss_mb[1]:,.1f} MB"
        fds = " -> ".join("-" if x is None else str(x) for x in self.fds_at_rest)
        return f"{self.pid:>8} {self.command:<48} {slope:>12}  {rss}  descriptors at rest {fds}"


@dataclass(frozen=True, slots=True)
class ProcessSeries:
    """A process at the kept samples: megabytes and open descriptors, None where it did not run."""

    pid: int
    command: str
    rss_mb: tuple[float | None, ...]
    fds: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class SoakSeries:
    """The kept samples by column: seconds, gauges by name, processes."""

    seconds: tuple[float, ...]
    gauges: dict[str, tuple[float | None, ...]]
    processes: tuple[ProcessSeries, ...]


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Result of a soak.

    Attributes:
        model: name of the model.
        warmup: first seconds, which slopes and ranges exclude.
        seconds: duration of the load, shorter than planned if the server ended.
        tally: counts of requests.
        samples: during the load.
        rest_before, rest_after: the idle server, before and after.
        ended: whether the server's parent process ended during the load.
    """

    model: str
    warmup: float
    seconds: float
    tally: Tally
    samples: list[Sample]
    rest_before: Sample
    rest_after: Sample
    ended: bool

    def trends(self) -> list[ProcessTrend]:
        """Trend of each observed process."""
        names = {p.pid: p.command for s in self.samples for p in s.processes.values()}
        return [self._trend(pid, name) for pid, name in sorted(names.items())]

    def _trend(self, pid: int, command: str) -> ProcessTrend:
        warm = [s for s in self.samples if s.at >= self.warmup and pid in s.processes]
        rss = [s.processes[pid].rss / MB for s in warm]
        fds = [s.processes[pid].fds for s in warm]
        slope = slope_per_hour([s.at for s in warm], rss)
        rest = [s.processes.get(pid) for s in (self.rest_before, self.rest_after)]
        return ProcessTrend(
            pid=pid,
            command=command,
            rss_mb_per_hour=None if slope is None else round(slope, 3),
            rss_mb=(round(rss[0], 1), round(rss[-1], 1)) if rss else None,
            fds_under_load=(min(fds), max(fds)) if fds else None,
            fds_at_rest=tuple(None if p is None else p.fds for p in rest),
        )

    def leaked_pages(self) -> tuple[float | None, float | None]:
        """Maximum over the samples, and value at rest after the load; None if the server does not
        report it."""
        seen = [s.gauges["leaked_pages"] for s in self.samples if "leaked_pages" in s.gauges]
        return (max(seen) if seen else None, self.rest_after.gauges.get("leaked_pages"))

    def series(self) -> SoakSeries:
        """A subset of the samples, evenly spaced."""
        step = -(-len(self.samples) // POINTS) or 1
        kept = self.samples[::step]
        gauges = {name: tuple(s.gauges.get(name) for s in kept) for name in GAUGES}
        processes = tuple(
            ProcessSeries(
                trend.pid,
                trend.command,
                tuple(None if p is None else round(p.rss / MB, 2) for p in states),
                tuple(None if p is None else p.fds for p in states),
            )
            for trend in self.trends()
            for states in [[s.processes.get(trend.pid) for s in kept]]
        )
        return SoakSeries(tuple(round(s.at, 1) for s in kept), gauges, processes)

    def fields(self) -> dict[str, object]:
        """As a JSON object."""
        most, at_rest = self.leaked_pages()
        tally, ttft = self.tally, Spread.of(self.tally.ttft)
        return {
            "seconds": round(self.seconds, 1),
            "ended_early": self.ended,
            "sent": dict(tally.sent),
            "completed": dict(tally.completed),
            "aborted": dict(tally.aborted),
            "errors": dict(tally.errors),
            "examples": tally.examples,
            "requests_per_s": round(sum(tally.completed.values()) / self.seconds, 3),
            "output_tokens_per_s": round(tally.output_tokens / self.seconds, 1),
            "ttft_ms": None if ttft is None else {"p50": ttft.median, "p99": ttft.p99},
            "warmup_s": self.warmup,
            "leaked_pages_most": most,
            "leaked_pages_at_rest": at_rest,
            "processes": [dataclasses.asdict(trend) for trend in self.trends()],
            "series": dataclasses.asdict(self.series()),
        }

    def lines(self) -> list[str]:
        """For a terminal."""
        tally = self.tally
        counts = (
            (tally.completed, "completed"),
            (tally.aborted, "aborted"),
            (tally.errors, "failed"),
        )
        lines = [
            f"{self.seconds:,.0f} s of load: "
            + ", ".join(f"{sum(c.values()):,} {name}" for c, name in counts)
        ]
        lines += [f"  {kind}: {n} ({tally.examples[kind]})" for kind, n in tally.errors.items()]
        if self.ended:
            lines.append("the server's process ended during the load")
        lines += [str(trend) for trend in self.trends()]
        most, at_rest = self.leaked_pages()
        if most is not None:
            lines.append(f"leaked pages: {most:g} at most, {at_rest} at rest")
        return lines


def slope_per_hour(seconds: Sequence[float], values: Sequence[float]) -> float | None:
    """Slope of the least-squares line through the values, per hour; None for too few of them."""
    if len(seconds) < FEWEST_FOR_A_SLOPE:
        return None
    return float(np.polyfit(seconds, values, 1)[0]) * HOUR
