"""`cairn batch`: the requests of an OpenAI batch file."""

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
)

OPTIONS = (
    click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File for the results, a line each.  [default: stdout]",
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


def batch_options(command: Any) -> Any:
    """Decorator: the options beside those of the engine."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@model_argument
@batch_options
@engine_options
def batch(file: str, model: Path | None, output: Path | None, **options: Any) -> None:
    """Answer the requests of FILE with MODEL.

    FILE holds a JSON object on each line, as OpenAI's Batch API takes them: custom_id, method, url
    and body; `-` is stdin. Results have the form of its output files, in the order in which they
    are ready. The exit code is 1 when a line was refused or failed.
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
