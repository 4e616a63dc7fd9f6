"""`cairn serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import fields
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
from cairn.obs import log
from cairn.version import __version__

SERVER = (
    click.option("--host", help="Address to listen on.  [default: 127.0.0.1]"),
    click.option("--port", type=int, help="Port of the API; 0: any free port.  [default: 8000]"),
    click.option(
        "--admin-port",
        type=int,
        help="Port of the admin routes, on the loopback address; 0: no admin routes.  "
        "[default: port + 1]",
    ),
    click.option(
        "--allowed-hosts",
        metavar="NAME",
        multiple=True,
        help="Accepted value of the Host header; others get 403. Repeatable; * accepts all.  "
        "[default: loopback and --host, if the server listens on loopback without a key; else "
        "all]",
    ),
    click.option(
        "--api-key",
        "api_keys",
        multiple=True,
        envvar="CAIRN_API_KEY",
        help="API key that clients have to send as a bearer token; repeatable. Or set "
        "CAIRN_API_KEY.",
    ),
    click.option(
        "--allowed-origins",
        multiple=True,
        metavar="ORIGIN",
        help="Origin that CORS allows, such as https://example.com; * allows all; repeatable.",
    ),
    click.option(
        "--served-model-name",
        multiple=True,
        metavar="NAME",
        help="Name of the model in the API; repeatable.  [default: the folder's name]",
    ),
    *REPLICAS,
    click.option(
        "--max-waiting",
        type=int,
        help="Maximum number of outputs in the queue; further requests get 429.  [default: 1024]",
    ),
    click.option(
        "--max-body-bytes", type=int, help="Maximum size of a request body.  [default: 16777216]"
    ),
    click.option(
        "--max-json-depth", type=int, help="Maximum nesting of a request body.  [default: 64]"
    ),
    click.option(
        "--max-headers", type=int, help="Maximum header lines of a request.  [default: 128]"
    ),
    click.option(
        "--max-prompts", type=int, help="Maximum prompts of a completions request.  [default: 256]"
    ),
    click.option("--max-stop", type=int, help="Maximum stop strings of a request.  [default: 16]"),
    click.option("--max-n", type=int, help="Maximum n of a request.  [default: 64]"),
    click.option(
        "--max-logprobs",
        type=int,
        help="Maximum logprobs and top_logprobs of a request.  [default: 20]",
    ),
    click.option(
        "--max-selection-tokens",
        type=int,
        help="Maximum output length of a request with a selection report.  [default: 4096]",
    ),
    click.option(
        "--body-timeout",
        type=float,
        help="Seconds within which a request body has to arrive.  [default: 60]",
    ),
    click.option(
        "--shutdown-timeout",
        type=float,
        help="Seconds that running requests have to finish after SIGTERM.  [default: 30]",
    ),
    click.option(
        "--ready-step-age",
        type=float,
        help="Seconds that a step may take before /ready returns 503.  [default: 5]",
    ),
    click.option(
        "--step-limit",
        type=float,
        help="Seconds that a step may take before the server exits.  [default: 300]",
    ),
    sampling_defaults_option,
    click.option(
        "--tool-parser",
        "--tool-call-parser",
        metavar="NAME",
        help="Format of tool calls: auto, hermes, llama3_json, qwen3_coder, mistral, mistral_list, "
        "deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4 or pythonic.  [default: auto, by "
        "the chat template]",
    ),
    click.option(
        "--reasoning-parser",
        metavar="NAME",
        help="Markers of the reasoning, which is returned as reasoning_content: auto, think "
        "(<think>), mistral, seed_oss, or none to leave it in the content.  [default: auto, by "
        "the chat template]",
    ),
    click.option(
        "--root-path",
        metavar="PATH",
        help="Path prefix under which a proxy serves this server, such as /llm. Routes work with "
        "and without it.",
    ),
    click.option(
        "--log-format", metavar="FORMAT", help="Log format: text or json.  [default: text]"
    ),
    click.option(
        "--trace",
        metavar="TARGET",
        help='Target of trace spans: "otel" (OpenTelemetry) or a file.',
    ),
)


NO_EFFECT = (
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-prefix-caching",
)
"""vLLM's flags of features that are always enabled."""

server_options = stacked(*SERVER)


@click.command()
@model_argument
@click.option(
    "--model-path",
    "--model",
    "named",
    type=click.Path(path_type=Path),
    help="The same as MODEL.",
)
@server_options
@engine_options
@click.option(
    *NO_EFFECT,
    "always_on",
    is_flag=True,
    expose_value=False,
    help="No effect: these features are always enabled.",
)
@click.pass_context
def serve(context: click.Context, /, model: Path | None, **options: Any) -> None:
    """Serve MODEL over HTTP with OpenAI-compatible routes.

    After SIGTERM or Ctrl-C running requests finish; a second signal stops at once.
    """
    from cairn.config import EngineOptions
    from cairn.server.options import ServerOptions

    model = model or options["named"]
    engine = EngineOptions(**engine_arguments(options))
    names = [field.name for field in fields(ServerOptions)]
    chosen = {name: options[name] for name in names if options[name] not in (None, ())}
    server = ServerOptions(**chosen)

    os.environ[log.FORMAT_VARIABLE] = server.log_format
    asked = context.parent.params.get("log_level") if context.parent is not None else None
    log.configure(asked, also=("uvicorn", "asyncio"))
    if asked is None and log.ENVIRONMENT_VARIABLE not in os.environ:
        # The access log is on, unless the user chose a level.
        logging.getLogger("cairn.access").setLevel(logging.INFO)

    from cairn.server.launch import serve as run

    click.echo(f"cairn {__version__}")
    sys.exit(run(model_or_default(model), engine, server, click.echo))
