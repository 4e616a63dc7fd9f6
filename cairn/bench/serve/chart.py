"""Charts of the measurements of a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.bench.chart import BLUE, GREEN, GREY, ORANGE, figure_of, save
from cairn.bench.serve.exchange import Outcome
from cairn.bench.serve.soak_report import SoakSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def serve_chart(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Distributions of TTFT, ITL and E2E, and output tokens per second over time."""
    done = [x for x in outcomes if x.complete]
    figure = figure_of(title)
    axes = figure.subplots(2, 2)
    panels = (
        (axes[0][0], "time to first token", [x.ttft for x in done if x.ttft is not None]),
        (axes[0][1], "inter-token latency", [gap for x in done for gap in x.gaps]),
        (axes[1][0], "end to end", [x.e2e for x in done]),
    )
    for ax, name, seconds in panels:
        _distribution(ax, name, np.array(seconds) * 1e3)
    _over_time(axes[1][1], done)
    save(figure, path)


def stall_chart(
    before: Sequence[tuple[float, float]],
    during: Sequence[tuple[float, float]],
    prefill: tuple[float, float],
    target_ms: float | None,
    path: Path,
) -> None:
    """Inter-token latencies over time, with the prefill of the long prompt shaded.

    Args:
        before, during: (when, seconds) of the streams' gaps.
        prefill: when the long prompt was sent and when its first token came.
        target_ms: the server's --itl-target-ms.
        path: the PNG.
    """
    figure = figure_of("Streams while a long prompt loads")
    ax = figure.subplots()
    start, end = prefill
    for gaps, color, name in ((before, BLUE, "before"), (during, ORANGE, "during the prefill")):
        when = [at - start for at, _ in gaps]
        ax.plot(when, [gap * 1e3 for _, gap in gaps], ".", ms=3, color=color, label=name)
    ax.axvspan(0.0, end - start, color=ORANGE, alpha=0.08, lw=0)
    if target_ms is not None:
        ax.axhline(target_ms, color=GREEN, lw=1, label=f"target {target_ms:g} ms")
        ax.axhline(2 * target_ms, color=GREEN, lw=1, ls="--", label="twice the target")
    ax.set_xlabel("seconds since the long prompt arrived")
    ax.set_ylabel("inter-token latency, ms")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, loc="upper left")
    save(figure, path)


def soak_chart(series: SoakSeries, warmup: float, path: Path) -> None:
    """Resident memory and file descriptors of each process over time.

    Args:
        series: the thinned samples.
        warmup: seconds that the slopes leave out.
        path: the PNG.
    """
    figure = figure_of("Soak")
    axes = figure.subplots(2, 1, sharex=True)
    minutes = np.array(series.seconds) / 60
    for ax, field, label in ((axes[0], "rss_mb", "RSS, MB"), (axes[1], "fds", "file descriptors")):
        for process in series.processes:
            values = [np.nan if x is None else x for x in getattr(process, field)]
            ax.plot(minutes, values, lw=1.2, label=f"{process.pid} {process.command}")
        ax.axvspan(0.0, warmup / 60, color=GREY, alpha=0.15, lw=0)
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8, loc="best")
    axes[1].set_xlabel("minutes (warm-up shaded)")
    save(figure, path)


def _distribution(ax: Axes, name: str, ms: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Cumulative distribution with median and p99 marked."""
    ax.set_title(name, fontsize=10, loc="left")
    ax.set_xlabel("ms")
    ax.set_ylabel("share of events")
    if not len(ms):
        ax.text(0.5, 0.5, "none", ha="center", transform=ax.transAxes, color=GREY)
        return
    ax.step(np.sort(ms), np.arange(1, len(ms) + 1) / len(ms), where="post", color=BLUE)
    for percent, color in ((50, GREEN), (99, ORANGE)):
        at = float(np.percentile(ms, percent))
        ax.axvline(at, color=color, lw=1, ls="--", label=f"p{percent} {at:,.1f} ms")
    ax.legend(frameon=False, fontsize=8, loc="best")


def _over_time(ax: Axes, done: Sequence[Outcome]) -> None:
    ax.set_title("output over time", fontsize=10, loc="left")
    ax.set_xlabel("seconds")
    ax.set_ylabel("pieces of text per second")
    stamps = np.array([stamp for x in done for stamp in x.stamps])
    if not len(stamps):
        ax.text(0.5, 0.5, "none", ha="center", transform=ax.transAxes, color=GREY)
        return
    stamps -= min(x.sent for x in done)
    width = max(0.1, float(stamps.max()) / 60)
    counts, edges = np.histogram(stamps, bins=np.arange(0.0, stamps.max() + 2 * width, width))
    ax.step(edges[:-1], counts / width, where="post", color=BLUE)
