"""Options that several commands of `cairn eval` share."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.cli.options import json_option, records_option, stacked

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
        help="Seconds without data after which a request fails.",
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
        help="Folder of the tokenizer that counts the server's tokens.  [default: its "
        "/tokenize, or its usage]",
    ),
    click.option(
        "--max-concurrency",
        type=POSITIVE,
        default=4,
        show_default=True,
        help="Maximum concurrent requests to the server.",
    ),
    click.option(
        "--chat",
        is_flag=True,
        help="Send prompts as user messages through the chat template.",
    ),
)

RESULT = (
    json_option,
    records_option,
)

text_option = click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="File or folder of text; repeatable.  [default: the sources of Python's standard library]",
)

connection_options = stacked(*CONNECTION)
server_options = stacked(*SERVER)
result_options = stacked(*RESULT)
