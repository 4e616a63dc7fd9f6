"""Options that several commands of `cairn eval` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cairn.cli.options import json_option

F = TypeVar("F", bound=Callable[..., Any])

POSITIVE = click.IntRange(min=1)

CONNECTION = (
    click.option(
        "--served-model",
        metavar="NAME",
        help=("Model name in requests to the server.  [default: the first that it lists]"),
    ),
    click.option(
        "--api-key",
        envvar="CAIRN_API_KEY",
        help=("API key, sent as a bearer token.  [default: CAIRN_API_KEY]"),
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        show_default=True,
        help="Seconds without a byte after which a request fails.",
    ),
)

SERVER = (
    click.option(
        "--base-url", help=("URL of an OpenAI-compatible server to evaluate instead of MODEL.")
    ),
    *CONNECTION,
    click.option(
        "--tokenizer",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder of a tokenizer to count the server's tokens with.  [default: its "
        "/tokenize, or its usage]",
    ),
    click.option(
        "--max-concurrency",
        type=POSITIVE,
        default=4,
        show_default=True,
        help="Requests in flight on the server.",
    ),
    click.option(
        "--chat",
        is_flag=True,
        help=("Send prompts as a message of the user, through the chat template."),
    ),
)

RESULT = (
    json_option,
    click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File that records are appended to.  [default: "
        "benchmarks/results/<date>-<machine>-<name>.json]",
    ),
)

chart_option = click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw a chart too. Needs `pip install 'cairn-llm[bench]'`.",
)


text_option = click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="File or folder of text; repeatable.  [default: the sources of Python's standard library]",
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
