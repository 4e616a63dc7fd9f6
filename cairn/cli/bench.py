"""`cairn bench`: measures throughput and latency, with the machine's roofline.

The measurements of a running server (`serve`, `stall`, `soak`) are in bench_serve.py.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.bench.shapes import KINDS
from cairn.cli.bench_serve import serve, soak, stall
from cairn.cli.options import (
    count_option,
    engine_arguments,
    engine_options,
    json_option,
    model_argument,
    parse_ids,
    records_option,
)
from cairn.config import DTYPES

if TYPE_CHECKING:
    from cairn.bench.ops import OpFailure, OpTiming
    from cairn.bench.records import Cell, RecordFile
    from cairn.bench.roofline import Roofline
    from cairn.bench.session import Subject

shape_option = click.option(
    "--shape",
    metavar="NAME",
    help="A published geometry with random weights: 345m, 7b, dsa-lite, dsa-lite-fp8,"
    " glm-slice, v4-slice, q35-2b, q35-9b, q35-35b-a3b or qwen3-8b.",
)


@click.group()
def bench() -> None:
    """Measure the speed of the engine, of ops or of a server.

    Every command appends its results to a file of records.
    """


for _command in (serve, stall, soak):
    bench.add_command(_command)


@bench.command()
@model_argument
@shape_option
@count_option("--num-prompts", 16, "Prompts.")
@count_option("--input-len", 512, "Tokens of each prompt.")
@count_option("--output-len", 64, "Tokens of each output.")
@click.option(
    "--kind", type=click.Choice(KINDS), help="Attention of the shape.  [default: its first]"
)
@records_option
@engine_options
def offline(
    model: Path | None, shape: str | None, kind: str | None, output: Path | None, **options: Any
) -> None:
    """Measure the throughput of a batch of prompts."""
    from cairn.bench.offline import OfflinePlan, run_offline

    subject = _subject(model, shape)
    plan = OfflinePlan(
        subject=subject,
        num_prompts=options["num_prompts"],
        input_len=options["input_len"],
        output_len=options["output_len"],
        backend=kind or subject.kinds[0],
        options=engine_arguments(options),
    )
    file = _records(f"offline-{plan.subject.name}", output)
    for cell in run_offline(plan):
        _keep(file, cell)
    _say_where(file)


@bench.command()
@model_argument
@shape_option
@click.option(
    "--contexts",
    metavar="LIST",
    default="1024,8192",
    show_default=True,
    help="Tokens of each prompt.",
)
@click.option(
    "--batches", metavar="LIST", default="1", show_default=True, help="Sequences that run together."
)
@count_option("--steps", 32, "Decode steps to time.")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    help=("Attention of the shape; repeatable.  [default: all that it has]"),
)
@click.option(
    "--fill",
    is_flag=True,
    help=("Fill the cache with random numbers instead of a prefill; measures decode steps only."),
)
@click.option(
    "--yardstick", is_flag=True, help="Also time transformers' generate on the dense shape."
)
@click.option(
    "--overlap",
    is_flag=True,
    help="Make neighbouring queries of a shape select similar pages, as in a trained model.",
)
@click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw a chart of the file of records. Needs `pip install 'cairn-llm[bench]'`.",
)
@records_option
@engine_options
def latency(
    model: Path | None,
    shape: str | None,
    kinds: tuple[str, ...],
    fill: bool,
    yardstick: bool,
    overlap: bool,
    chart: Path | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Measure steps by context length and batch size.

    The machine's memory bandwidth and GEMM rate are measured in the same run. Each result is shown
    with its share of the roofline that follows from them.
    """
    from cairn.bench.chart import latency_chart, require_matplotlib
    from cairn.bench.latency import LatencyPlan, run_latency
    from cairn.bench.records import known
    from cairn.bench.yardstick import run_yardstick

    subject = _subject(model, shape, overlap)
    if yardstick and subject.model is not None:
        raise click.UsageError("--yardstick compares shapes: give --shape instead of MODEL")
    require_matplotlib(chart)
    plan = LatencyPlan(
        subject=subject,
        contexts=_numbers(options["contexts"], "--contexts"),
        batches=_numbers(options["batches"], "--batches"),
        steps=options["steps"],
        backends=kinds or subject.kinds,
        options=engine_arguments(options),
        fill=fill,
    )
    file = _records("latency", output)
    line: Roofline | None = None
    for cell, line in run_latency(plan):
        _keep(file, cell, line)
    assert line is not None
    click.echo(
        f"measured in this run: {line.bandwidth / 1e9:.1f} GB/s read, "
        f"{line.gemm / 1e9:.0f} GFLOP/s in {line.dtype}"
    )
    for context in plan.contexts if yardstick else ():
        for batch in plan.batches:
            for cell in run_yardstick(subject.shape, context, batch, plan.steps, line.dtype):
                _keep(file, cell, line)
    _say_where(file)
    if chart is not None:
        latency_chart(known(file.path), chart)


@bench.command()
@model_argument
@shape_option
@count_option("--context", 32768, "Tokens of each prompt.", least=8)
@click.option(
    "--batches", metavar="LIST", default="1", show_default=True, help="Sequences that run together."
)
@count_option("--output-len", 2048, "Tokens of each output.", least=2)
@count_option("--drafts", 7, "Tokens that a row drafts at a time.")
@click.option(
    "--kind", type=click.Choice(KINDS), help="Attention of the shape.  [default: its first]"
)
@records_option
@engine_options
def speculation(
    model: Path | None, shape: str | None, kind: str | None, output: Path | None, **options: Any
) -> None:
    """Measure speculative decoding against plain decoding.

    Three outputs are measured: a passage copied from the prompt, random text, and text for which
    all drafts are wrong.
    """
    from cairn.bench.speculation import SpeculationPlan, run_speculation

    subject = _subject(model, shape)
    plan = SpeculationPlan(
        subject=subject,
        context=options["context"],
        batches=_numbers(options["batches"], "--batches"),
        output_len=options["output_len"],
        drafts=options["drafts"],
        backend=kind or subject.kinds[0],
        options=engine_arguments(options),
    )
    file = _records(f"speculation-{plan.subject.name}", output)
    for cell in run_speculation(plan):
        click.echo(
            f"{cell.case:<14}context {cell.context:>7}  batch {cell.batch:>3}  step "
            f"{cell.plain_ms:.3f} ms, with guesses {cell.ms:.3f} ms  "
            f"{cell.plain_tokens_per_s:,.1f} tokens/s, {cell.tokens_per_s:,.1f}  "
            f"{cell.accepted} of {cell.drafted} right"
        )
        file.add(dataclasses.asdict(cell))
    _say_where(file)


@bench.command()
@click.argument("names", nargs=-1, metavar="[OP|FAMILY]...")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES[1:]),
    help=("Dtype of the arguments.  [default: bfloat16; float32 on a CPU]"),
)
@click.option(
    "--device", metavar="NAME", help="cpu, cuda or cuda:N.  [default: a GPU if there is one]"
)
@click.option(
    "--sizes",
    type=click.Choice(["tiny", "full"]),
    help="full: sizes of layers of the published shapes; tiny: small ones.  "
    "[default: full; tiny on a CPU]",
)
@json_option
@records_option
def ops(names: tuple[str, ...], as_json: bool, output: Path | None, **options: Any) -> None:
    """Measure ops and compare them with other libraries.

    Without arguments all ops are measured, each at several sizes.

    The machine's memory bandwidth and GEMM rate are measured in the same run. Each op is shown with
    its share of the roofline, of the bandwidth of a large copy and of a copy of equal size, and
    with the speedup over the fastest alternative outside of cairn.
    """
    from cairn.bench.ops import OpsPlan, run_ops, this_device

    device = options["device"] or this_device()
    on_cpu = device == "cpu"
    plan = OpsPlan(
        names,
        options["dtype"] or ("float32" if on_cpu else "bfloat16"),
        device,
        options["sizes"] or ("tiny" if on_cpu else "full"),
    )
    file = _records("ops", output)
    records = []
    try:
        for row, line in run_ops(plan):
            records.append(file.add(row.fields(), line))
            if not as_json:
                click.echo(_op_line(row))
    finally:
        if as_json:
            click.echo(json.dumps(records))
        _say_where(file, err=as_json)


def _subject(model: Path | None, shape: str | None, overlap: bool = False) -> Subject:
    from cairn.bench.session import Subject
    from cairn.config import default_model_path

    if model is not None and shape is not None:
        raise click.UsageError("give MODEL or --shape, not both")
    if shape is not None:
        return Subject(None, shape, overlap)
    if overlap:
        raise click.UsageError("--overlap changes a shape: give --shape instead of MODEL")
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


def _op_line(row: OpTiming | OpFailure) -> str:
    from cairn.bench.ops import OpFailure

    start = f"{row.op:<40} {row.size or '':<44} "
    if isinstance(row, OpFailure):
        return f"{start}FAILED: {row.error}"
    beside = ""
    if row.alternative_ms is not None:
        beside = f"  {row.alternative} {row.alternative_ms * 1e3:,.1f} us ({row.speedup:.2f}x)"
    alike = "" if row.of_alike is None else f"{row.of_alike:>6.0%} of a copy of as many bytes"
    launches = "" if row.launches is None else f"  {row.launches} launches"
    host = "" if row.host_ms is None else f"  host {row.host_ms * 1e3:,.0f} us"
    if row.least_host_ms is not None:
        host += f" ({row.least_host} {row.least_host_ms * 1e3:,.0f})"
    return (
        f"{start}{row.implementation:<14}{row.ms * 1e3:>11,.1f} us"
        f"{row.gb_s:>7,.0f} GB/s{row.gflop_s / 1e3:>7,.1f} TFLOP/s"
        f"{row.fraction:>6.0%} of the floor{row.of_copy:>6.0%} of a copy{alike}"
        f"{launches}{beside}{host}"
    )


def _records(name: str, output: Path | None) -> RecordFile:
    from cairn.bench.records import RecordFile

    return RecordFile(name, shlex.join(["cairn", *sys.argv[1:]]), output)


def _keep(file: RecordFile, cell: Cell, roofline: Roofline | None = None) -> None:
    from cairn.bench.records import fields_of

    _show(cell)
    file.add(fields_of(cell), roofline)


def _say_where(file: RecordFile, err: bool = False) -> None:
    # There is no file if the run failed before its first measurement.
    if file.count:
        click.echo(f"{file.count} records appended to {file.path}", err=err)
