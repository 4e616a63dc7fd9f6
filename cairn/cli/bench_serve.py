"""`cairn bench serve`, `stall` and `soak`: measurements of a running server over HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.cli.options import chart_option, count_option, records_option, stacked
from cairn.errors import CairnError

if TYPE_CHECKING:
    from cairn.bench.serve.client import ServerAddress
    from cairn.bench.serve.record import Recorder
    from cairn.bench.serve.run import ServePlan

DATASETS = ("random", "shared-prefix", "sharegpt")
POSITIVE = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0, min_open=True)

SERVER = (
    click.option(
        "--base-url", default="http://127.0.0.1:8000", show_default=True, help="URL of the server."
    ),
    click.option(
        "--model", help=("Model name in requests.  [default: the first that the server lists]")
    ),
    click.option(
        "--api-key",
        envvar="CAIRN_API_KEY",
        help=("API key, sent as a bearer token.  [default: CAIRN_API_KEY]"),
    ),
    click.option(
        "--tokenizer",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder of the tokenizer that counts tokens.  [default: the server's "
        "/tokenize, or its usage]",
    ),
    click.option(
        "--timeout",
        type=SECONDS,
        default=600.0,
        show_default=True,
        help="Seconds without data after which a request fails.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Seed of prompts and arrivals."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the record instead of a table."),
    records_option,
    chart_option,
)

server_options = stacked(*SERVER)


@click.command()
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="API that requests use.",
)
@click.option(
    "--dataset-name",
    type=click.Choice(DATASETS),
    default="random",
    show_default=True,
    help="Kind of prompts.",
)
@click.option(
    "--dataset-path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of ShareGPT conversations: a JSON list, or one object per line.",
)
@count_option("--random-input-len", 1024, "Tokens of each prompt.")
@count_option("--random-output-len", 128, "Tokens of each output.")
@click.option(
    "--random-range-ratio",
    type=float,
    default=0.0,
    show_default=True,
    help="Lengths are uniform in (1 - ratio) to (1 + ratio) times these.",
)
@count_option("--shared-prefix-len", 1024, "Tokens of a shared prefix.")
@count_option("--shared-prefix-groups", 4, "Number of different shared prefixes.")
@click.option(
    "--num-prompts",
    type=POSITIVE,
    help=("Requests to send.  [default: 100, or what --duration allows]"),
)
@click.option("--duration", type=SECONDS, help="Send requests for this many seconds.")
@click.option(
    "--request-rate",
    type=float,
    default=float("inf"),
    show_default=True,
    help="Requests per second; inf sends as fast as --max-concurrency allows.",
)
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="Shape of the gamma distribution of arrivals: 1 is Poisson, below 1 bursty, above 1 even.",
)
@click.option(
    "--max-concurrency", type=POSITIVE, help="Maximum concurrent requests.  [default: no limit]"
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@click.option(
    "--temperature",
    type=float,
    default=0.0,
    show_default=True,
    help="Sampling temperature; 0: greedy.",
)
@click.option(
    "--abort-fraction",
    type=float,
    default=0.0,
    show_default=True,
    help="Share of the clients that disconnect at a random moment.",
)
@server_options
def serve(as_json: bool, output: Path | None, chart: Path | None, **options: Any) -> None:
    """Measure throughput and latency of a server.

    Works with OpenAI-compatible servers. The client measures TTFT (time to first token), TPOT (time
    per output token after the first), ITL (time between two events of the stream) and E2E (the
    whole request).
    """
    from cairn.bench.chart import require_matplotlib
    from cairn.bench.serve.chart import serve_chart
    from cairn.bench.serve.load import run
    from cairn.bench.serve.report import render
    from cairn.bench.serve.run import run_serve

    plan = _serve_plan(options)
    require_matplotlib(chart)
    recorder = _recorder("serve", output)
    found = run(run_serve(plan))
    report = found.report
    title = f"{found.model}: {_load_in_words(options, plan)}"
    if not as_json:
        from rich.console import Console

        Console().print(render(report, title), highlight=False)
    _finish(recorder, found.model, _settings(options, plan) | report.fields(), as_json)
    if chart is not None:
        serve_chart(found.outcomes, title, chart)
    if report.failed and not report.completed:
        kind, text = next(iter(report.examples.items()))
        raise CairnError(f"every request failed; the first: {kind}: {text}")


@click.command()
@count_option("--streams", 8, "Streams that decode.")
@count_option("--stream-input-len", 64, "Prompt tokens of a stream.")
@count_option(
    "--stream-output-len",
    8192,
    "Output tokens of a stream; enough for the whole measurement.",
)
@count_option("--long-input-len", 65536, "Tokens of the long prompt.")
@click.option(
    "--seconds-before",
    type=SECONDS,
    default=10.0,
    show_default=True,
    help="Seconds for which the streams are measured before the long prompt.",
)
@click.option(
    "--itl-target-ms",
    type=SECONDS,
    help="The server's --itl-target-ms, to compare the result with.",
)
@server_options
def stall(as_json: bool, output: Path | None, chart: Path | None, **options: Any) -> None:
    """Measure a long prompt next to running streams.

    A long prompt is prefilled alone, then one arrives while streams decode, then one is prefilled
    alone again. The faster of the two prefills without streams is the baseline.
    """
    from cairn.bench.chart import require_matplotlib
    from cairn.bench.serve.chart import stall_chart
    from cairn.bench.serve.load import run
    from cairn.bench.serve.stall import StallPlan, run_stall

    plan = StallPlan(
        address=_address(options),
        streams=options["streams"],
        stream_len=options["stream_input_len"],
        stream_output=options["stream_output_len"],
        long_len=options["long_input_len"],
        seconds_before=options["seconds_before"],
        target_ms=options["itl_target_ms"],
        seed=options["seed"],
        tokenizer=options["tokenizer"],
    )
    require_matplotlib(chart)
    recorder = _recorder("stall", output)
    found = run(run_stall(plan))
    settings = {"streams": plan.streams, "context": plan.long_len}
    _finish(recorder, found.model, settings | found.fields(), as_json, found.lines())
    if chart is not None:
        prefill = (found.beside.sent, found.beside.first)
        stall_chart(found.before, found.during, prefill, found.target_ms, chart)


@click.command()
@click.option(
    "--duration", type=SECONDS, default=3600.0, show_default=True, help="Seconds of load."
)
@click.option(
    "--pid",
    type=POSITIVE,
    help="Process id of the server, to measure its memory and that of its children.",
)
@count_option("--max-concurrency", 8, "Maximum concurrent requests.")
@click.option(
    "--request-rate",
    type=float,
    default=float("inf"),
    show_default=True,
    help="Requests per second; inf keeps --max-concurrency in flight.",
)
@count_option("--long-input-len", 8192, "Tokens of the longest prompts.")
@click.option(
    "--abort-fraction",
    type=float,
    default=0.1,
    show_default=True,
    help="Share of the clients that disconnect at a random moment.",
)
@click.option(
    "--interval", type=SECONDS, default=10.0, show_default=True, help="Seconds between samples."
)
@click.option(
    "--settle",
    type=SECONDS,
    default=8.0,
    show_default=True,
    help="Idle seconds before the final reading of memory and descriptors; servers "
    "close idle connections after 5.",
)
@click.option(
    "--warmup",
    type=float,
    help="Seconds at the start that the memory slope excludes.  [default: duration / 6]",
)
@server_options
def soak(as_json: bool, output: Path | None, chart: Path | None, **options: Any) -> None:
    """Load a server for a long time and look for leaks.

    Measures the growth of memory, open descriptors and pages.

    The load mixes short chats, long prompts, shared prefixes, n > 1 and stop strings, with and
    without streaming. Some clients disconnect early.
    """
    from cairn.bench.chart import require_matplotlib
    from cairn.bench.serve.chart import soak_chart
    from cairn.bench.serve.load import run
    from cairn.bench.serve.soak import SoakPlan, run_soak

    plan = SoakPlan(
        address=_address(options),
        duration=options["duration"],
        pid=options["pid"],
        max_concurrency=options["max_concurrency"],
        rate=options["request_rate"],
        long_len=options["long_input_len"],
        abort_fraction=options["abort_fraction"],
        interval=options["interval"],
        warmup=options["warmup"],
        settle=options["settle"],
        seed=options["seed"],
        tokenizer=options["tokenizer"],
    )
    require_matplotlib(chart)
    recorder = _recorder("soak", output)
    found = run(run_soak(plan))
    settings = {"concurrency": plan.max_concurrency, "context": plan.long_len}
    _finish(recorder, found.model, settings | found.fields(), as_json, found.lines())
    if chart is not None:
        soak_chart(found.series(), plan.from_second, chart)
    if found.ended:
        raise CairnError(f"the server's process {plan.pid} ended after {found.seconds:.0f} s")


def _address(options: Mapping[str, Any]) -> ServerAddress:
    from cairn.bench.serve.client import ServerAddress

    return ServerAddress(
        options["base_url"], options["model"], options["api_key"], options["timeout"]
    )


def _serve_plan(options: Mapping[str, Any]) -> ServePlan:
    from cairn.bench.serve.datasets import DatasetOptions
    from cairn.bench.serve.load import Pace
    from cairn.bench.serve.run import ServePlan

    count = options["num_prompts"]
    if count is None and options["duration"] is None:
        count = 100
    return ServePlan(
        address=_address(options),
        dataset=DatasetOptions(
            name=options["dataset_name"],
            path=options["dataset_path"],
            input_len=options["random_input_len"],
            output_len=options["random_output_len"],
            range_ratio=options["random_range_ratio"],
            prefix_len=options["shared_prefix_len"],
            prefix_groups=options["shared_prefix_groups"],
            seed=options["seed"],
        ),
        pace=Pace(
            rate=options["request_rate"],
            burstiness=options["burstiness"],
            max_concurrency=options["max_concurrency"],
            count=count,
            duration=options["duration"],
            seed=options["seed"],
        ),
        chat=options["endpoint"] == "chat",
        ignore_eos=options["ignore_eos"],
        temperature=options["temperature"],
        abort_fraction=options["abort_fraction"],
        tokenizer=options["tokenizer"],
    )


def _settings(options: Mapping[str, Any], plan: ServePlan) -> dict[str, object]:
    """The options of the run, for the record."""
    rate = options["request_rate"]
    return {
        "endpoint": options["endpoint"],
        "dataset": plan.dataset.name,
        "request_rate": "inf" if rate == float("inf") else rate,
        "max_concurrency": plan.pace.max_concurrency,
        "abort_fraction": plan.abort_fraction,
    }


def _load_in_words(options: Mapping[str, Any], plan: ServePlan) -> str:
    rate, limit = options["request_rate"], plan.pace.max_concurrency
    pace = "as fast as it goes" if rate == float("inf") else f"{rate:g} requests/s"
    places = "" if limit is None else f", {limit} at once"
    return f"{plan.dataset.name} prompts, {options['endpoint']}, {pace}{places}"


def _recorder(phase: str, output: Path | None) -> Recorder:
    from cairn.bench.serve.record import Recorder

    return Recorder(phase, sys.argv[1:], output)


def _finish(
    recorder: Recorder,
    model: str,
    fields: Mapping[str, object],
    as_json: bool,
    lines: Sequence[str] = (),
) -> None:
    """Append the record to the file, and print it as JSON or as lines."""
    record, path = recorder.save(model, fields)
    if as_json:
        click.echo(json.dumps(record))
    for line in () if as_json else lines:
        click.echo(line)
    click.echo(f"1 record appended to {path}", err=as_json)
