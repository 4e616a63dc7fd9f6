"""`cairn eval`: needles, RULER, perplexity by context length, and parity of logits."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.cli.eval_options import (
    connection_options,
    result_options,
    server_options,
    text_option,
)
from cairn.cli.options import (
    chart_option,
    count_option,
    engine_arguments,
    engine_options,
    model_argument,
    model_or_default,
    parse_ids,
)
from cairn.eval.options import FORMATS, RULER_TASKS, TASKS, VARIANTS

if TYPE_CHECKING:
    from cairn.bench.records import RecordFile
    from cairn.bench.serve.client import ServerAddress
    from cairn.eval.haystack import Filler
    from cairn.eval.subject import Source


@click.group("eval")
def evaluate() -> None:
    """Evaluate a model on long contexts.

    Every command appends its results to a file of records.
    """


@evaluate.command()
@model_argument
@click.option(
    "--task",
    "tasks",
    type=click.Choice(TASKS),
    multiple=True,
    help="Task to run; repeatable.  [default: all]",
)
@click.option(
    "--lengths",
    metavar="LIST",
    default="1024,4096,16384",
    show_default=True,
    help="Lengths in tokens, prompt and answer together.",
)
@click.option(
    "--depths",
    metavar="LIST",
    default="0,0.25,0.5,0.75,1",
    show_default=True,
    help="Positions of the needles, 0 (start) to 1 (end of the document).",
)
@count_option("--samples", 3, "Questions for each combination of task, length and depth.")
@count_option("--keys", 16, "Needles in a document of the task multi.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="auto",
    show_default=True,
    help="Format of needles; auto: lines if the model's README.md shows them, else english.",
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="File or folder with the text of documents; repeatable.  [default: the sources of "
    "Python's standard library for lines, generated prose for english]",
)
@click.option(
    "--variant",
    "variants",
    type=click.Choice(list(VARIANTS)),
    multiple=True,
    help="Engine setting to run the grid with; repeatable, answers are compared "
    "with the first's.  [default: base]",
)
@click.option(
    "--needle-seed", type=int, default=0, show_default=True, help="Seed of the documents."
)
@chart_option
@server_options
@result_options
@engine_options
def needle(
    model: Path | None, as_json: bool, output: Path | None, chart: Path | None, **options: Any
) -> None:
    """Ask for facts (needles) hidden in documents.

    Reports the share of exact answers by length and depth.

    Tasks: single (one fact in a document), multi (many facts, one of them asked for), tracking (a
    chain of three variables).

    Variants: warm (a second question about a cached document), cold (no prefix cache), odd-chunks
    (prefill chunks of 509 slots), no-graphs (no CUDA graphs), fp8 and fp4 (pages in 8 and 4
    bits), dense and window (other attention backends).
    """
    from cairn.bench.chart import require_matplotlib
    from cairn.eval.chart import heat_map
    from cairn.eval.grid import NeedlePlan, run_needle
    from cairn.eval.needles import Grid
    from cairn.eval.report import needle_tables

    plan = NeedlePlan(
        source=_source(model, options),
        grid=Grid(
            tasks=options["tasks"] or TASKS,
            lengths=_lengths(options["lengths"]),
            depths=_depths(options["depths"]),
            samples=options["samples"],
            keys=options["keys"],
            seed=options["needle_seed"],
        ),
        form=options["form"],
        filler=_filler(options["texts"]),
        variants=tuple(dict.fromkeys(options["variants"])) or ("base",),
    )
    require_matplotlib(chart)
    file = _records("needle", _name(plan.source), output)
    records: list[dict[str, Any]] = []
    for cells in run_needle(plan, lambda cell: records.append(file.add(cell))):
        if not as_json:
            _say_progress(cells)
    _finish(file, records, needle_tables(records), as_json)
    if chart is not None:
        heat_map(records, chart)


@evaluate.command()
@model_argument
@click.option(
    "--task",
    "tasks",
    type=click.Choice(RULER_TASKS),
    multiple=True,
    help="Task to run; repeatable.  [default: all]",
)
@click.option(
    "--lengths",
    metavar="LIST",
    default="4096",
    show_default=True,
    help="Lengths in tokens, prompt and answer together.",
)
@count_option("--samples", 20, "Prompts for each task and length; the paper uses 500.")
@click.option("--ruler-seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@server_options
@result_options
@engine_options
def ruler(model: Path | None, as_json: bool, output: Path | None, **options: Any) -> None:
    """Run RULER's tasks that need no external data.

    The tasks are retrieval of needles (niah_*), variable tracking (vt), common words (cwe) and
    frequent words (fwe). The score is that of the paper (arXiv 2404.06654): the share of the right
    answers that the output contains.
    """
    from cairn.eval.grid import RulerPlan, run_ruler
    from cairn.eval.report import ruler_table

    plan = RulerPlan(
        source=_source(model, options),
        tasks=tuple(dict.fromkeys(options["tasks"])) or RULER_TASKS,
        lengths=_lengths(options["lengths"]),
        samples=options["samples"],
        seed=options["ruler_seed"],
    )
    file = _records("ruler", _name(plan.source), output)
    records: list[dict[str, Any]] = []
    for record in run_ruler(plan, lambda cell: records.append(file.add(cell))):
        if not as_json:
            click.echo(
                f"{record['task']:<16}{record['length']:>9,} tokens  {record['score']:>5.1f}%"
                f"  {record['seconds']:>8,.1f} s"
            )
    _finish(file, records, [ruler_table(records)], as_json)


@evaluate.command()
@model_argument
@text_option
@click.option(
    "--lengths",
    metavar="LIST",
    default="4096,16384",
    show_default=True,
    help="Lengths in tokens, context and predicted tokens together.",
)
@count_option("--last", 2048, "Number of last tokens whose loss is measured.")
@count_option("--samples", 4, "Excerpts of the text.")
@chart_option
@result_options
@engine_options
def ppl(
    model: Path | None, as_json: bool, output: Path | None, chart: Path | None, **options: Any
) -> None:
    """Measure perplexity and bits per byte by context length.

    All lengths predict the same last tokens of a text. The shortest length is the baseline.
    """
    from cairn.bench.chart import require_matplotlib
    from cairn.eval.chart import context_chart
    from cairn.eval.ppl import PplPlan, run_ppl
    from cairn.eval.report import ppl_table

    plan = PplPlan(
        model=model_or_default(model),
        options=engine_arguments(options),
        texts=options["texts"],
        lengths=_lengths(options["lengths"]),
        last=options["last"],
        samples=options["samples"],
    )
    require_matplotlib(chart)
    file = _records("ppl", plan.model.name, output)
    records: list[dict[str, Any]] = []
    for record in run_ppl(plan, lambda found: records.append(file.add(found))):
        if not as_json:
            click.echo(
                f"{record['length']:>9,} tokens  {record['bits_per_byte']:.4f} bits per byte  "
                f"{record['seconds']:>8,.1f} s"
            )
    _finish(file, records, [ppl_table(records)], as_json)
    if chart is not None:
        context_chart(records, chart)


@evaluate.command()
@model_argument
@click.option(
    "--other",
    "others",
    metavar="NAME=VALUE",
    multiple=True,
    help="Compare with the engine after changing an option, such as dtype=float32; repeatable.",
)
@click.option(
    "--reference",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Compare with a safetensors file of input_ids [n] and the last positions' logits [k, V].",
)
@click.option(
    "--base-url",
    help="Compare with an OpenAI-compatible server that returns the prompt's log-probabilities.",
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the engine's logits to a file for --reference instead of comparing.",
)
@text_option
@count_option("--length", 2048, "Tokens of each prompt.")
@count_option("--last", 256, "Number of last positions of each prompt to compare.")
@count_option("--samples", 2, "Prompts.")
@connection_options
@result_options
@engine_options
def parity(model: Path | None, as_json: bool, output: Path | None, **options: Any) -> None:
    """Compare logits with another source.

    The other source is the same model with other options, a file of logits, or a server. Shown are
    KL divergence, top-1 agreement and the largest difference of a log-probability.
    """
    from cairn.eval import parity as comparison
    from cairn.eval.report import parity_table

    sources = ("others", "reference", "base_url", "save")
    if sum(bool(options[name]) for name in sources) != 1:
        raise click.UsageError("give one of --other, --reference, --base-url and --save")
    if options["reference"] is not None and options["texts"]:
        raise click.UsageError("the file of --reference holds its prompt: leave --text out")
    plan = comparison.ParityPlan(
        model=model_or_default(model),
        options=engine_arguments(options),
        texts=options["texts"],
        length=options["length"],
        last=options["last"],
        samples=options["samples"],
    )
    address = _address(options)
    if options["save"] is not None:
        saved = comparison.save_reference(plan, options["save"])
        click.echo(f"{saved['rows']} rows of logits in {options['save']}")
        return
    file = _records("parity", plan.model.name, output)
    if address is not None:
        found = comparison.against_server(plan, address)
    elif options["reference"] is not None:
        found = comparison.against_file(plan, options["reference"])
    else:
        found = comparison.against_options(plan, dict(map(_changed, options["others"])))
    shared = {"shape": plan.model.name, "phase": "parity", "options": dict(plan.options)}
    record = file.add(shared | found)
    _finish(file, [record], [parity_table(record)], as_json)


def _changed(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE to a keyword of LLM: an integer, a float, a boolean or a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--other")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _say_progress(cells: list[dict[str, Any]]) -> None:
    from cairn.eval.grid import totals

    first, all_of_them = cells[0], totals(cells)
    click.echo(
        f"{first['variant']:<11}{first['task']:<9}{first['length']:>9,} tokens  "
        f"{all_of_them['right']:>3}/{all_of_them['asked']:<3} right  {first['seconds']:>8,.1f} s"
    )


def _finish(
    file: RecordFile, records: list[dict[str, Any]], tables: list[Any], as_json: bool
) -> None:
    """Print the records as JSON or as tables, and the path of their file."""
    if as_json:
        click.echo(json.dumps(records))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for table in tables:
            console.print(table)
    click.echo(f"{file.count} records appended to {file.path}", err=as_json)


def _address(options: Mapping[str, Any]) -> ServerAddress | None:
    """The server that the options name, or None."""
    from cairn.bench.serve.client import ServerAddress

    if options["base_url"] is None:
        if options["served_model"] is not None:
            raise click.UsageError("--served-model goes with --base-url")
        return None
    names = ("base_url", "served_model", "api_key", "timeout")
    return ServerAddress(*(options[name] for name in names))


def _source(model: Path | None, options: Mapping[str, Any]) -> Source:
    from cairn.eval.subject import Source

    address = _address(options)
    if address is not None and model is not None:
        raise click.UsageError("give MODEL or --base-url, not both")
    if address is None and options["tokenizer"] is not None:
        raise click.UsageError("--tokenizer goes with --base-url")
    return Source(
        model=model_or_default(model),
        options=engine_arguments(options),
        address=address,
        tokenizer=options["tokenizer"],
        at_once=options["max_concurrency"],
        chat=options["chat"],
    )


def _filler(texts: tuple[Path, ...]) -> Filler | None:
    from cairn.eval.haystack import files_filler

    return files_filler(texts) if texts else None


def _lengths(text: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(parse_ids(text, "--lengths")))
    if min(numbers) < 1:
        raise click.BadParameter(f"{text!r} holds a number below 1", param_hint="--lengths")
    return numbers


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        message = f"{text!r} is not a list such as 0,0.5,1"
        raise click.BadParameter(message, param_hint="--depths") from None


def _name(source: Source) -> str:
    """Name of the model, for the file of records."""
    address = source.address
    return source.model.name if address is None else address.model or "server"


def _records(phase: str, name: str, output: Path | None) -> RecordFile:
    from cairn.bench.records import RecordFile
    from cairn.bench.serve.record import command_line

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return RecordFile(f"{phase}-{name}", command_line(sys.argv[1:]), output)
