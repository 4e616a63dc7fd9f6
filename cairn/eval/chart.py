"""Charts of evaluations as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.bench.chart import BLUE, GREY, figure_of, save

Record = Mapping[str, Any]


PANEL = (3.4, 2.6)
"""Width and height of one heat map in inches."""


def heat_map(records: Sequence[Record], path: Path) -> None:
    """Draw heat maps of accuracy by depth and length, one column per task, one row per variant.

    Args:
        records: records of `cairn eval needle`; of several with the same settings the last is used.
        path: PNG file to write.
    """
    cells = {(r["variant"], r["task"], r["depth"], r["length"]): r for r in records}
    variants = list(dict.fromkeys(key[0] for key in cells))
    tasks = list(dict.fromkeys(key[1] for key in cells))
    models = ", ".join(dict.fromkeys(str(r["shape"]) for r in records))
    figure = figure_of(f"{models}: share of needles found, by depth and length")
    figure.set_size_inches(2.0 + PANEL[0] * len(tasks), 1.0 + PANEL[1] * len(variants))
    axes = figure.subplots(len(variants), len(tasks), squeeze=False)
    image = None
    for row, variant in zip(axes, variants, strict=True):
        for ax, task in zip(row, tasks, strict=True):
            here = {key[2:]: r for key, r in cells.items() if key[:2] == (variant, task)}
            ax.set_title(f"{task}, {variant}", fontsize=10, loc="left")
            if not here:
                ax.text(0.5, 0.5, "none", ha="center", transform=ax.transAxes, color=GREY)
                continue
            depths = sorted({depth for depth, _ in here})
            lengths = sorted({length for _, length in here})
            shares = [
                [here[d, n]["accuracy"] if (d, n) in here else float("nan") for n in lengths]
                for d in depths
            ]
            image = ax.imshow(shares, cmap="RdYlGn", vmin=0.0, vmax=1.0, aspect="auto", alpha=0.7)
            for (depth, length), r in here.items():
                at = lengths.index(length), depths.index(depth)
                ax.text(*at, f"{r['right']}/{r['asked']}", ha="center", va="center", fontsize=8)
            ax.set_xticks(range(len(lengths)), [short(n) for n in lengths])
            ax.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
            ax.set_xlabel("tokens")
            ax.set_ylabel("depth")
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.6, label="accuracy")
    save(figure, path)


def short(tokens: int) -> str:
    """Format a length: 65536 -> "64K"."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def context_chart(records: Sequence[Record], path: Path) -> None:
    """Plot bits per byte by context length: the mean as a thick line, each excerpt as a thin one.

    Args:
        records: records of one run of `cairn eval ppl`.
        path: PNG file to write.
    """
    ordered = sorted(records, key=lambda r: r["length"])
    lengths = [r["length"] for r in ordered]
    figure = figure_of(f"{ordered[0]['shape']}: the last {ordered[0]['last']:,} tokens")
    ax = figure.subplots()
    for excerpt in zip(*(r["each_bits_per_byte"] for r in ordered), strict=True):
        ax.plot(lengths, excerpt, color=GREY, lw=0.7, alpha=0.6)
    ax.plot(lengths, [r["bits_per_byte"] for r in ordered], color=BLUE, marker="o", ms=4)
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [short(n) for n in lengths])
    ax.set_xlabel("tokens of context")
    ax.set_ylabel("bits per byte")
    save(figure, path)
