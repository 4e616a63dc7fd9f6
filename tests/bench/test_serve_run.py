"""`cairn bench serve` against a scripted server: the load, its report, record and chart."""

import json
import sys

import pytest

from cairn.bench.records import check_appendable
from cairn.bench.serve.client import ServerAddress
from cairn.bench.serve.datasets import DatasetOptions
from cairn.bench.serve.exchange import Outcome
from cairn.bench.serve.load import Pace, run
from cairn.bench.serve.record import command_line
from cairn.bench.serve.report import Spread, summarize
from cairn.bench.serve.run import ServePlan, run_serve
from cairn.cli.main import main
from cairn.errors import BadConfig
from tests.bench.fake_api import FakeApi

SHORT = DatasetOptions(input_len=20, output_len=5)


def load(api, pace=None, dataset=SHORT, **plan):
    pace = pace or Pace(count=10, max_concurrency=4)
    return run(run_serve(ServePlan(ServerAddress(api.url), dataset, pace, **plan)))


def ended(sent, stamps, end, tokens=(10, 3), **fields):
    outcome = Outcome(sent=sent, due=sent, ended=end, **fields)
    outcome.stamps.extend(stamps)
    outcome.input_tokens, outcome.output_tokens = tokens
    return outcome


def test_rates_and_latencies_of_known_outcomes():
    report = summarize(
        [
            ended(0.0, [1.0, 1.5, 2.0], 2.0, counted=True),
            ended(1.0, [1.5, 2.5, 5.0], 5.0, counted=True, cached_tokens=4),
            ended(1.0, [], 3.0, error="HTTP 500", detail="first"),
            ended(1.0, [], 3.0, error="HTTP 500", detail="second"),
            ended(1.0, [2.0], 3.0, aborted=True),
        ]
    )
    assert (report.completed, report.failed, report.aborted) == (2, 2, 1)
    assert report.errors == {"HTTP 500": 2} and report.examples == {"HTTP 500": "first"}
    assert report.seconds == 5.0
    assert report.requests_per_s == pytest.approx(0.4)
    assert report.input_tokens_per_s == pytest.approx(4.0)
    assert report.output_tokens_per_s == pytest.approx(1.2)
    assert report.tokens_per_s == pytest.approx(5.2)
    assert (report.ttft.mean, report.ttft.median, report.ttft.max) == (750, 750, 1000)
    assert report.itl.count == 4 and report.itl.mean == 1125 and report.itl.max == 2500
    assert report.tpot.mean == pytest.approx((500 + 1750) / 2)
    assert report.e2e.mean == 3000
    assert report.cached_tokens == 4 and report.counted


def test_percentiles():
    spread = Spread.of(x / 1000 for x in range(1, 101))
    assert (spread.count, spread.median, spread.p99) == (100, 50.5, 99.01)
    assert Spread.of([None]) is None


def test_a_load_runs_to_its_end():
    with FakeApi(prefill=0.0005, pace=0.002) as api:
        found = load(api)
        # One additional request warms up the server.
        assert len(api.bodies) == 11
        assert api.most_running == 4
    report = found.report
    assert found.model == "fake-model"
    assert (report.completed, report.input_tokens, report.output_tokens) == (10, 200, 50)
    assert report.counted and report.itl.count == 40
    assert report.ttft.median >= 10 and report.e2e.median > report.ttft.median


def test_prompts_are_made_before_the_load_or_by_proportion():
    with FakeApi() as api:
        load(api, Pace(duration=0.3, max_concurrency=2))
        # One text gives the characters per token; prompts of the load are not counted.
        assert api.tokenized == 1
        assert len(api.bodies) > 3


def test_without_usage_the_output_is_counted_by_the_server():
    with FakeApi(usage=False) as api:
        report = load(api).report
    assert report.output_tokens == 50 and not report.counted


def test_eos_and_abort_and_chat():
    with FakeApi(eos_after=2, pace=0.005) as api:
        assert load(api).report.output_tokens == 20
        assert load(api, ignore_eos=True).report.output_tokens == 50
        found = load(api, abort_fraction=1.0, dataset=DatasetOptions(output_len=5000), chat=True)
        assert found.report.aborted + found.report.completed == 10
        assert found.report.aborted >= 1
        assert "messages" in api.bodies[-1]


def test_the_abort_fraction_is_a_fraction():
    with pytest.raises(BadConfig, match="1.5"):
        ServePlan(ServerAddress(), SHORT, Pace(count=1), abort_fraction=1.5)


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Runs a command line with a file of records; returns (exit code, stdout, stderr, records)."""
    path = tmp_path / "records.json"

    def call(*arguments):
        given = [*map(str, arguments), "--output", str(path)]
        monkeypatch.setattr(sys, "argv", ["cairn", *given])
        with pytest.raises(SystemExit) as end:
            main(given)
        shown = capsys.readouterr()
        kept = json.loads(path.read_text()) if path.exists() else []
        return end.value.code, shown.out, shown.err, kept

    return call


SMALL = ("--num-prompts", 6, "--random-input-len", 20, "--random-output-len", 4)


def test_the_table_the_record_and_the_chart(cli, tmp_path):
    chart = tmp_path / "charts" / "load.png"
    with FakeApi(key="sk-secret") as api:
        arguments = ("--base-url", api.url, "--api-key", "sk-secret", "--chart", chart)
        code, out, _, kept = cli("bench", "serve", *arguments, *SMALL, "--request-rate", 500)
    assert code == 0
    for text in ("6 completed", "TTFT", "TPOT", "ITL", "E2E", "p99", "output tokens/s"):
        assert text in out
    record = kept[0]
    assert (record["phase"], record["shape"], record["completed"]) == ("serve", "fake-model", 6)
    assert record["ttft_ms"].keys() == {"count", "mean", "median", "p99", "max"}
    assert {"cpu", "commit", "command", "date", "tokens_per_s"} < record.keys()
    assert record["request_rate"] == 500
    assert "sk-secret" not in json.dumps(kept) and "--api-key ..." in record["command"]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_json_is_the_record_alone(cli):
    with FakeApi() as api:
        code, out, _, kept = cli("bench", "serve", "--base-url", api.url, *SMALL, "--json")
    assert code == 0
    assert json.loads(out) == kept[0]


def test_failures_are_shown_and_all_of_them_are_a_failure(cli):
    with FakeApi(status={1: 503, 2: 503}) as api:
        code, out, _, kept = cli("bench", "serve", "--base-url", api.url, *SMALL)
        assert code == 0
        assert "HTTP 503" in out and "refused 1" in out
        assert kept[0]["errors"] == {"HTTP 503": 2}
    with FakeApi(status=dict.fromkeys(range(20), 500)) as api:
        code, _, err, kept = cli("bench", "serve", "--base-url", api.url, *SMALL)
    assert code == 1
    assert "every request failed" in err and "refused" in err
    assert len(kept) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--request-rate", "0"), "rate must be above 0"),
        (("--dataset-name", "sharegpt"), "--dataset-path"),
        (("--random-range-ratio", "1"), "range ratio"),
        (("--duration", "5"), "--max-concurrency"),
        (("--chart", "load.jpg"), "not a PNG"),
    ],
)
def test_bad_options_fail_before_the_server_is_asked(cli, arguments, message):
    with FakeApi() as api:
        code, _, err, _ = cli("bench", "serve", "--base-url", api.url, *arguments)
        assert code == 2 and message in err
        assert not api.bodies and not api.tokenized


def test_a_chart_without_matplotlib_names_the_extra(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err, kept = cli("bench", "serve", "--chart", tmp_path / "x.png")
    assert code == 2 and "cairn-llm[bench]" in err and not kept


def test_a_client_without_aiohttp_names_the_extra(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, _, err, _ = cli("bench", "serve")
    assert code == 2 and "cairn-llm[bench]" in err


def test_the_key_is_left_out_of_the_command():
    assert command_line(["bench", "--api-key", "s p"]) == "cairn bench --api-key ..."
    assert command_line(["bench", "--api-key=s"]) == "cairn bench --api-key=..."
    assert command_line(["a", "b c"]) == "cairn a 'b c'"


@pytest.mark.parametrize("text", ["{", '{"a": 1}'])
def test_a_file_that_cannot_take_records_is_seen_at_the_start(tmp_path, text):
    path = tmp_path / "records.json"
    path.write_text(text)
    with pytest.raises(BadConfig, match="records.json"):
        check_appendable(path)
