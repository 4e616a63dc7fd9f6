"""`cairn bench`: throughput and latency, recorded with the machine's roofline.

What measures a running server (`serve`, `stall`, `soak`) is in bench_serve.py.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.cli.bench_serve import serve, soak, stall
from cairn.cli.options import engine_arguments, engine_options, model_argument, parse_ids

if TYPE_CHECKING:
    from cairn.bench.records import Cell
    from cairn.bench.roofline import Roofline
    from cairn.bench.session import Subject

KINDS = ("hsa", "dense")

shape_option = click.option(
    "--shape", metavar="NAME", help="A published geometry with random weights: 345m."
)
output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of records; the default is benchmarks/results/<date>-<machine>-<name>.json.",
)


@click.group()
def bench() -> None:
    """Measure the engine or a server and append the records to a file."""


for _command in (serve, stall, soak):
    bench.add_command(_command)


@bench.command()
@model_argument
@shape_option
@click.option("--num-prompts", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--input-len", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--output-len", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--kind", type=click.Choice(KINDS), default="hsa", show_default=True)
@output_option
@engine_options
def offline(
    model: Path | None, shape: str | None, kind: str, output: Path | None, **options: Any
) -> None:
    """Throughput of many prompts given at once."""
    from cairn.bench.offline import OfflinePlan, run_offline

    plan = OfflinePlan(
        subject=_subject(model, shape),
        num_prompts=options["num_prompts"],
        input_len=options["input_len"],
        output_len=options["output_len"],
        backend=kind,
        options=engine_arguments(options),
    )
    cells = run_offline(plan)
    for cell in cells:
        _show(cell)
    _record(cells, None, f"offline-{plan.subject.name}", output)


@bench.command()
@model_argument
@shape_option
@click.option("--contexts", metavar="LIST", default="1024,8192", show_default=True)
@click.option("--batches", metavar="LIST", default="1", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Default: both.")
@click.option("--fill", is_flag=True, help="Random pages instead of a prefill: decode only.")
@click.option("--yardstick", is_flag=True, help="transformers' generate on the dense twin too.")
@output_option
@engine_options
def latency(
    model: Path | None,
    shape: str | None,
    kinds: tuple[str, ...],
    fill: bool,
    yardstick: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Prefill seconds and decode milliseconds per step, per context length and batch.

    The memory bandwidth and the GEMM rate of this machine are measured in the same run; each
    cell is shown with the share of that floor it reaches.
    """
    from cairn.bench.latency import LatencyPlan, run_latency

    subject = _subject(model, shape)
    if yardstick and subject.model is not None:
        raise click.UsageError("--yardstick compares shapes: give --shape instead of MODEL")
    plan = LatencyPlan(
        subject=subject,
        contexts=_numbers(options["contexts"], "--contexts"),
        batches=_numbers(options["batches"], "--batches"),
        steps=options["steps"],
        backends=kinds or KINDS,
        options=engine_arguments(options),
        fill=fill,
    )
    cells, roofline = run_latency(plan, _show)
    click.echo(
        f"measured in this run: {roofline.bandwidth / 1e9:.1f} GB/s read, "
        f"{roofline.gemm / 1e9:.0f} GFLOP/s in {roofline.dtype}"
    )
    if yardstick:
        from cairn.bench.yardstick import run_yardstick

        for context in plan.contexts:
            for batch in plan.batches:
                found = run_yardstick(subject.shape, context, batch, plan.steps, roofline.dtype)
                for cell in found:
                    _show(cell)
                cells += found
    _record(cells, roofline, f"latency-{subject.name}", output)


def _subject(model: Path | None, shape: str | None) -> Subject:
    from cairn.bench.session import Subject
    from cairn.config import default_model_path

    if model is not None and shape is not None:
        raise click.UsageError("give MODEL or --shape, not both")
    if shape is not None:
        return Subject(None, shape)
    return Subject(model or default_model_path())


def _numbers(text: str, option: str) -> tuple[int, ...]:
    numbers = tuple(parse_ids(text, option))
    if min(numbers) < 1:
        raise click.BadParameter(f"{text!r} holds a number below 1", param_hint=option)
    return numbers


def _show(cell: Cell) -> None:
    fraction = "" if cell.fraction is None else f"  {cell.fraction:4.0%} of the floor"
    pages = "" if cell.pages_read is None else f"  {cell.pages_read:.1f} pages a query"
    size = "" if cell.parameters is None else f"{cell.parameters / 1e6:>7.1f}M "
    click.echo(
        f"{cell.phase:<8}{cell.backend:<13}{size}{cell.dtype:<9} context {cell.context:>7}  "
        f"batch {cell.batch:>3}  {cell.ms:>11,.2f} ms  {cell.tokens_per_s:>10,.1f} tokens/s"
        f"{fraction}{pages}"
    )


def _record(cells: list[Cell], roofline: Roofline | None, name: str, output: Path | None) -> None:
    from cairn.bench.machine import commit, describe_machine
    from cairn.bench.records import RunInfo, append, default_path, records

    machine = describe_machine()
    run = RunInfo(
        machine,
        commit(),
        shlex.join(["cairn", *sys.argv[1:]]),
        roofline.bandwidth if roofline else None,
        roofline.gemm if roofline else None,
    )
    path = output or default_path(name, machine)
    append(records(cells, run), path)
    click.echo(f"{len(cells)} records appended to {path}")
