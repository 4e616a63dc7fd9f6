"""Tables of evaluations for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cairn.eval.chart import short
from cairn.eval.grid import totals

if TYPE_CHECKING:
    from rich.table import Table

Record = dict[str, Any]


def needle_tables(records: Sequence[Record]) -> list[Table]:
    """One table per task with the accuracy of the first variant by length and depth.

    With several variants a second table compares their accuracy, and how many of their answers are
    equal to those of the first.
    """
    variants = list(dict.fromkeys(r["variant"] for r in records))
    tables = []
    for task in dict.fromkeys(r["task"] for r in records):
        of_task = [r for r in records if r["task"] == task]
        lengths = sorted({r["length"] for r in of_task})
        depths = sorted({r["depth"] for r in of_task})
        here = [r for r in of_task if r["variant"] == variants[0]]
        table = _table(f"{task}, {variants[0]}: right of asked by depth", "tokens")
        for name in [*(f"{d:.0%}" for d in depths), "all", "accuracy", "95%"]:
            table.add_column(name, justify="right")
        for length in lengths:
            row = {r["depth"]: r for r in here if r["length"] == length}
            cells = [f"{row[d]['right']}/{row[d]['asked']}" for d in depths]
            table.add_row(short(length), *cells, *_summary(totals(list(row.values()))))
        tables.append(table)
        if len(variants) > 1:
            tables.append(_compared(task, of_task, variants, lengths))
    return tables


def ruler_table(records: Sequence[Record]) -> Table:
    """Scores from 0 to 100, one row per task, one column per length; the last row is the mean."""
    lengths = sorted({r["length"] for r in records})
    tasks = list(dict.fromkeys(r["task"] for r in records))
    scores = {(r["task"], r["length"]): r["score"] for r in records}
    table = _table("RULER: share of the right answers found, %", "")
    table.columns[0].justify = "left"
    for length in lengths:
        table.add_column(short(length), justify="right")
    for task in tasks:
        table.add_row(task, *(f"{scores[task, n]:.1f}" for n in lengths))
    table.add_section()
    means = (sum(scores[task, n] for task in tasks) / len(tasks) for n in lengths)
    table.add_row("mean", *(f"{mean:.1f}" for mean in means))
    return table


def ppl_table(records: Sequence[Record]) -> Table:
    """Loss by length, and its change from the shortest length."""
    table = _table(f"the last {records[0]['last']:,} tokens", "context")
    for name in ("bits per byte", "perplexity", f"more than at {short(records[0]['length'])}"):
        table.add_column(name, justify="right")
    for r in records:
        error = "" if r["more_error"] is None else f" ± {r['more_error']:.2%}"
        table.add_row(
            short(r["length"]),
            f"{r['bits_per_byte']:.4f}",
            f"{r['perplexity']:.4f}",
            f"{r['more_than_first']:+.2%}{error}",
        )
    return table


def parity_table(record: Record) -> Table:
    """The results of a comparison, one per row."""
    against = record["against"]
    if isinstance(against, dict):
        against = ", ".join(f"{name}={value}" for name, value in against.items())
    table = _table(f"{record['rows']:,} positions against {against}", "")
    table.columns[0].justify = "left"
    table.add_column("", justify="right")
    for label, text in (
        ("KL, mean", f"{record['kl_mean']:.3g}"),
        ("KL, largest", f"{record['kl_max']:.3g}"),
        ("the likeliest token agrees", f"{record['top1_agreement']:.2%}"),
        ("log-probability, median of largest differences", f"{record['logprob_error_median']:.3g}"),
        ("log-probability, largest difference", f"{record['logprob_error_max']:.3g}"),
    ):
        table.add_row(label, text)
    table.show_header = False
    return table


def _compared(
    task: str, records: Sequence[Record], variants: Sequence[str], lengths: Sequence[int]
) -> Table:
    table = _table(f"{task}: right of asked (answers equal to those of {variants[0]})", "tokens")
    for variant in variants:
        table.add_column(variant, justify="right")
    for length in lengths:
        cells = []
        for variant in variants:
            found = totals([r for r in records if (r["variant"], r["length"]) == (variant, length)])
            cells.append(f"{found['right']}/{found['asked']} ({found['same_as_first']})")
        table.add_row(short(length), *cells)
    return table


def _summary(found: Record) -> tuple[str, str, str]:
    interval = f"{found['low']:.0%} to {found['high']:.0%}"
    return f"{found['right']}/{found['asked']}", f"{found['accuracy']:.1%}", interval


def _table(title: str, first: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first, justify="right")
    return table
