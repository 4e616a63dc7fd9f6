"""Charts as PNG files. matplotlib is imported only when a chart is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.config import SMALL_KV_DTYPES
from cairn.errors import BadConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#3b6ea5", "#c8702a", "#4b8b5a", "#8a8a8a"
SIZE = (10.0, 6.4)
DPI = 120
BACKEND_COLORS = {"hsa": BLUE, "dense": ORANGE}
BATCH_STYLES = ("-", "--", ":", "-.")

Record = Mapping[str, Any]


def require_matplotlib(path: Path | None) -> None:
    """Check before a measurement that its chart can be written.

    Raises:
        BadConfig: a chart is wanted and matplotlib is missing, or the file is not a PNG file.
    """
    if path is None:
        return
    if path.suffix != ".png":
        raise BadConfig(f"the chart {path} is not a PNG file", "Give a file name that ends in .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        hint = "Install the extra: pip install 'cairn-llm[bench]'"
        raise BadConfig(f"the chart needs matplotlib: {error}", hint) from error


def figure_of(title: str) -> Figure:
    """An empty figure. pyplot is not used, so there is no global state and no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the PNG file, and create its folder if needed."""
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def latency_chart(records: Sequence[Record], path: Path) -> None:
    """Chart of milliseconds over context length, HSA and dense attention, with a row of prefill and
    decode axes per shape.

    Args:
        records: of `cairn bench latency`; the last record of each cell is drawn.
        path: the PNG file.
    """
    cells = {_cell(record): record for record in records if record["phase"] in PHASES}
    shapes = list(dict.fromkeys(str(record["shape"]) for record in cells.values()))
    figure = figure_of("Prefill and decode step over the context (thin: what the roofline allows)")
    axes = figure.subplots(max(1, len(shapes)), len(PHASES), squeeze=False)
    for row, shape in zip(axes, shapes, strict=False):
        for ax, (phase, label) in zip(row, PHASES.items(), strict=True):
            ax.set_title(f"{shape}: {phase}", fontsize=10, loc="left")
            ax.set_xlabel("context, tokens")
            ax.set_ylabel(label)
            here = [r for r in cells.values() if (r["shape"], r["phase"]) == (shape, phase)]
            _lines(ax, here)
    save(figure, path)


PHASES = {"prefill": "ms", "decode": "ms a step"}


def _cell(record: Record) -> tuple[object, ...]:
    names = ("shape", "phase", "context", "batch", "backend", "dtype", "selection")
    return (*(record.get(name) for name in names), _small(record))


def _small(record: Record) -> str:
    """Dtype of the cache if it is smaller than that of the weights; otherwise empty."""
    dtype = record.get("kv_cache_dtype")
    return dtype if dtype in SMALL_KV_DTYPES else ""


def _lines(ax: Axes, records: Sequence[Record]) -> None:
    """One line per backend, batch and kind of selection, and a thin line for its roofline floor."""
    batches = sorted({record["batch"] for record in records})
    lines: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=lambda r: r["context"]):
        selection = record.get("selection")
        key = (record["backend"], record["batch"], selection, _small(record))
        lines.setdefault(key, []).append(record)
    for (backend, batch, selection, small), line in sorted(lines.items(), key=str):
        color = BACKEND_COLORS.get(backend, GREY)
        style = BATCH_STYLES[batches.index(batch) % len(BATCH_STYLES)]
        contexts = [record["context"] for record in line]
        ms = [record["ms"] for record in line]
        name = f"{backend}, batch {batch}"
        name += "" if selection in (None, "random") else f", {selection} pages"
        name += f", {small}" if small else ""
        marker = "o" if selection in (None, "random") else "s"
        ax.plot(contexts, ms, style, color=color, marker=marker, ms=4, label=name)
        if all(record["floor_ms"] is not None for record in line):
            floor = [record["floor_ms"] for record in line]
            ax.plot(contexts, floor, style, color=color, lw=0.7, alpha=0.6)
    if not records:
        ax.text(0.5, 0.5, "none", ha="center", transform=ax.transAxes, color=GREY)
        return
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(contexts := sorted({record["context"] for record in records}))
    ax.set_xticklabels([f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in contexts])
    ax.legend(frameon=False, fontsize=8, loc="best")
