"""`cairn batch`: answers the requests of an OpenAI batch file."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from cairn.cli.options import (
    REPLICAS,
    engine_arguments,
    engine_options,
    model_argument,
    model_or_default,
    sampling_defaults_option,
    stacked,
)

OPTIONS = (
    click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File for the results, one line each.  [default: stdout]",
    ),
    click.option(
        "--served-model-name",
        multiple=True,
        metavar="NAME",
        help="Name of the model in the requests; repeatable.  [default: the folder's name]",
    ),
    click.option(
        "--tool-parser",
        "--tool-call-parser",
        metavar="NAME",
        help="As in `cairn serve`.  [default: auto]",
    ),
    click.option(
        "--reasoning-parser", metavar="NAME", help="As in `cairn serve`.  [default: auto]"
    ),
    sampling_defaults_option,
    *REPLICAS,
)
SERVER_NAMES = (
    *("served_model_name", "tool_parser", "reasoning_parser", "sampling_defaults"),
    *("data_parallel_size", "load_balance_method"),
)

batch_options = stacked(*OPTIONS)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@model_argument
@batch_options
@engine_options
def batch(file: str, model: Path | None, output: Path | None, **options: Any) -> None:
    """Answer the requests of FILE with MODEL.

    FILE has one request per line in the format of OpenAI's Batch API: a JSON object with custom_id,
    method, url and body; `-` reads stdin. Results have the format of the API's output files, in
    order of completion. The exit code is 1 if any request was refused or failed.
    """
    from cairn.config import EngineOptions
    from cairn.server.batch import run_batch
    from cairn.server.options import ServerOptions

    engine = EngineOptions(**engine_arguments(options))
    chosen = {name: options[name] for name in SERVER_NAMES if options[name] not in (None, ())}
    with ExitStack() as stack:
        lines = stack.enter_context(click.open_file(file, encoding="utf-8"))
        target = sys.stdout if output is None else stack.enter_context(output.open("w", 1, "utf-8"))
        counts = run_batch(
            model_or_default(model),
            engine,
            ServerOptions(**chosen),
            lines,
            target.write,
            lambda text: click.echo(text, err=True),
        )
    click.echo(f"{counts.answered} answered, {counts.failed} refused or failed", err=True)
    sys.exit(1 if counts.failed else 0)
