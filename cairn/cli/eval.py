"""`cairn eval`: does the model find, follow and predict at length; do two engines agree."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cairn.cli.options import (
    engine_arguments,
    engine_options,
    json_option,
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

F = TypeVar("F", bound=Callable[..., Any])

POSITIVE = click.IntRange(min=1)

CONNECTION = (
    click.option(
        "--served-model", metavar="NAME", help="Of the server's.  [default: the first it lists]"
    ),
    click.option(
        "--api-key", envvar="CAIRN_API_KEY", help="Bearer token.  [default: $CAIRN_API_KEY]"
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        show_default=True,
        help="Seconds without a byte that make a request fail.",
    ),
)

SERVER = (
    click.option("--base-url", help="Ask this OpenAI-compatible server instead of MODEL."),
    *CONNECTION,
    click.option(
        "--tokenizer",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder that counts the server's tokens.  [default: its /tokenize, or its usage]",
    ),
    click.option(
        "--max-concurrency",
        type=POSITIVE,
        default=4,
        show_default=True,
        help="Documents in flight on a server.",
    ),
    click.option("--chat", is_flag=True, help="Ask as a user's message, by the chat template."),
)

RESULT = (
    json_option,
    click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File of records; the default is benchmarks/results/<date>-<machine>-<name>.json.",
    ),
)

chart_option = click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw it too (needs the extra `bench`).",
)


text_option = click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="File or folder of text; repeatable.  [default: the standard library's sources]",
)


def _decorator(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


connection_options = _decorator(CONNECTION)
server_options = _decorator(SERVER)
result_options = _decorator(RESULT)


@click.group("eval")
def evaluate() -> None:
    """Measure what a model gets right at length, and append the records to a file."""


@evaluate.command()
@model_argument
@click.option(
    "--task", "tasks", type=click.Choice(TASKS), multiple=True, help="Repeatable.  [default: all]"
)
@click.option(
    "--lengths",
    metavar="LIST",
    default="1024,4096,16384",
    show_default=True,
    help="Tokens of a prompt with its answer.",
)
@click.option(
    "--depths",
    metavar="LIST",
    default="0,0.25,0.5,0.75,1",
    show_default=True,
    help="Where needles stand, as shares of the document.",
)
@click.option(
    "--samples", type=POSITIVE, default=3, show_default=True, help="Needles of each cell."
)
@click.option(
    "--keys", type=POSITIVE, default=16, show_default=True, help="In a document of `multi`."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="auto",
    show_default=True,
    help="How needles are written; auto goes by the model's card.",
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="File or folder that documents are made of; repeatable.  [default: the standard "
    "library's sources for lines, made-up prose for english]",
)
@click.option(
    "--variant",
    "variants",
    type=click.Choice(list(VARIANTS)),
    multiple=True,
    help="Run the grid this way; repeatable, compared with the first.  [default: base]",
)
@click.option("--needle-seed", type=int, default=0, show_default=True, help="Of the documents.")
@chart_option
@server_options
@result_options
@engine_options
def needle(
    model: Path | None, as_json: bool, output: Path | None, chart: Path | None, **options: Any
) -> None:
    """Hide facts at a grid of depths and lengths, ask for them, count exact answers.

    single: one fact in a document. multi: many keys in one, one asked for at every depth.
    tracking: a chain of three links.

    Variants: warm (a second question on the same document), cold (no prefix cache), odd-chunks
    (of 509 slots), no-graphs, fp8 (pages), dense, window.
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
    help="Repeatable.  [default: all]",
)
@click.option(
    "--lengths",
    metavar="LIST",
    default="4096",
    show_default=True,
    help="Tokens of a prompt with its answer.",
)
@click.option(
    "--samples",
    type=POSITIVE,
    default=20,
    show_default=True,
    help="Prompts of a task at each length; the paper has 500.",
)
@click.option("--ruler-seed", type=int, default=0, show_default=True, help="Of the prompts.")
@server_options
@result_options
@engine_options
def ruler(model: Path | None, as_json: bool, output: Path | None, **options: Any) -> None:
    """RULER's tasks that need no data from outside, on texts made up here.

    Retrieval of needles (niah_*), variable tracking (vt), common words (cwe) and frequent words
    (fwe), scored as the paper does (arXiv 2404.06654): the share of the right answers found.
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
    help="Tokens of context and predicted tokens together.",
)
@click.option(
    "--last", type=POSITIVE, default=2048, show_default=True, help="Tokens that are predicted."
)
@click.option(
    "--samples", type=POSITIVE, default=4, show_default=True, help="Stretches of the text."
)
@chart_option
@result_options
@engine_options
def ppl(
    model: Path | None, as_json: bool, output: Path | None, chart: Path | None, **options: Any
) -> None:
    """Bits per byte and perplexity of a text's last tokens as their context grows.

    Every length predicts the same tokens; the shortest is what the others are compared with.
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
    help="Against this engine with a keyword of LLM changed, such as dtype=float32; repeatable.",
)
@click.option(
    "--reference",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Against a file of logits: safetensors with input_ids [n] and logits [k, V] of its end.",
)
@click.option(
    "--base-url", help="Against an OpenAI-compatible server that echoes log-probabilities."
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Against nothing: write this engine's logits as a file for --reference.",
)
@text_option
@click.option("--length", type=POSITIVE, default=2048, show_default=True, help="Of a prompt.")
@click.option(
    "--last", type=POSITIVE, default=256, show_default=True, help="Positions that are compared."
)
@click.option("--samples", type=POSITIVE, default=2, show_default=True, help="Prompts.")
@connection_options
@result_options
@engine_options
def parity(model: Path | None, as_json: bool, output: Path | None, **options: Any) -> None:
    """Logits of this engine against another source: KL, top-1 agreement, largest difference."""
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
    """A keyword of LLM with its value: numbers and true or false are such, all else is text."""
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
    """Show the records or their tables, and where the records are."""
    if as_json:
        click.echo(json.dumps(records))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for table in tables:
            console.print(table)
    click.echo(f"{file.count} records appended to {file.path}", err=as_json)


def _address(options: Mapping[str, Any]) -> ServerAddress | None:
    """The server that the options name."""
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
    """Of who is asked, for the file of records."""
    address = source.address
    return source.model.name if address is None else address.model or "server"


def _records(phase: str, name: str, output: Path | None) -> RecordFile:
    from cairn.bench.records import RecordFile
    from cairn.bench.serve.record import command_line

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return RecordFile(f"{phase}-{name}", command_line(sys.argv[1:]), output)
