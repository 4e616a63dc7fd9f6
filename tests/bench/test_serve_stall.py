"""`cairn bench stall`: a long prompt with concurrent streams."""

import json
import sys
from array import array

import pytest

from cairn.bench.serve.client import ServerAddress
from cairn.bench.serve.exchange import Outcome
from cairn.bench.serve.load import run
from cairn.bench.serve.stall import Prefill, StallPlan, StallResult, run_stall, split_gaps
from cairn.cli.main import main
from cairn.errors import BadConfig, CairnError
from tests.bench.fake_api import FakeApi


def stream(*stamps):
    return Outcome(stamps=array("d", stamps))


def test_a_gap_belongs_to_the_prefill_when_any_part_of_it_lies_there():
    outcomes = [stream(0.5, 1.5, 2.0, 4.0, 4.5, 9.0, 9.5), stream(1.2, 2.2, 30.0)]
    before, during = split_gaps(outcomes, calm=1.0, prefill=Prefill(sent=3.0, first=8.0, tokens=5))
    assert before == [(2.0, 0.5), (2.2, pytest.approx(1.0))]
    # The largest gaps began before the prompt arrived or ended after its first token.
    assert during == [(4.0, 2.0), (4.5, 0.5), (9.0, 4.5), (30.0, pytest.approx(27.8))]


def test_stall_result_fields():
    result = StallResult(
        "m",
        alone=Prefill(0.0, 10.0, 1000),
        beside=Prefill(100.0, 112.5, 1000),
        before=[(50.0, 0.02)] * 10,
        during=[(105.0, 0.03)] * 9 + [(106.0, 0.09)],
        target_ms=50.0,
    )
    fields = result.fields()
    assert fields["prefill_alone_tokens_per_s"] == 100
    assert fields["prefill_beside_tokens_per_s"] == 80
    assert fields["prefill_share"] == 0.8
    assert fields["itl_before_ms"] == {"count": 10, "p50": 20, "p99": 20, "max": 20}
    assert fields["itl_during_ms"]["p50"] == 30 and fields["itl_during_ms"]["max"] == 90
    assert fields["itl_p99_over_target"] == pytest.approx(84.6 / 50, abs=0.01)
    assert "80% of its lone speed" in result.lines()[-1]


def plan(api, **changes):
    given = {
        "streams": 3,
        "stream_len": 10,
        "stream_output": 100_000,
        "long_len": 1000,
        "seconds_before": 0.3,
    }
    return StallPlan(ServerAddress(api.url), **(given | changes))


def test_streams_that_stall_are_seen_to_stall():
    with FakeApi(prefill=0.0005, pace=0.005, stalled=0.1, long=500) as api:
        found = run(run_stall(plan(api)))
        assert api.most_running == 4
        # Without streams, with streams, without streams again; the prompts differ.
        longest = [body["prompt"] for body in api.bodies if len(body["prompt"]) > 2000]
        assert len(set(longest)) == len(longest) == 3
    assert found.alone.tokens == found.beside.tokens == 1000
    assert found.alone.seconds >= 0.5 and found.beside.seconds >= 0.5
    itl = found.itl
    assert itl["before"].median < 50
    assert itl["during"].max >= 100 > 2 * itl["before"].median
    assert itl["during"].count >= 3 * 4


def test_the_faster_of_the_lone_prompts_counts():
    """The first prefill includes one-time costs of the server and is not the baseline."""
    with FakeApi(prefill=0.0005, pace=0.005, long=500, first_long=1.0) as api:
        found = run(run_stall(plan(api)))
    assert 0.5 <= found.alone.seconds < 1.5


def test_streams_that_end_early_are_no_measurement():
    with FakeApi(pace=0.005) as api, pytest.raises(CairnError, match="--stream-output-len"):
        run(run_stall(plan(api, stream_output=5)))


def test_a_long_prompt_that_fails():
    with FakeApi(status={1: 400}) as api, pytest.raises(CairnError, match="1000 tokens.*HTTP 400"):
        run(run_stall(plan(api)))


@pytest.mark.parametrize("changes", [{"streams": 0}, {"target_ms": 0.0}, {"seconds_before": -1}])
def test_plans_that_cannot_be_are_refused(changes):
    with pytest.raises(BadConfig):
        StallPlan(ServerAddress(), **changes)


def test_the_command(monkeypatch, capsys, tmp_path):
    path, chart = tmp_path / "records.json", tmp_path / "stall.png"
    with FakeApi(prefill=0.0002, pace=0.005, long=500) as api:
        given = ["bench", "stall", "--base-url", api.url, "--streams", "2"]
        given += ["--long-input-len", "800", "--seconds-before", "0.2", "--itl-target-ms", "20"]
        given += ["--output", str(path), "--chart", str(chart)]
        monkeypatch.setattr(sys, "argv", ["cairn", *given])
        with pytest.raises(SystemExit) as end:
            main(given)
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "ITL before" in out and "ITL during" in out and "times the target 20 ms" in out
    (record,) = json.loads(path.read_text())
    assert (record["phase"], record["streams"], record["context"]) == ("stall", 2, 800)
    assert record["itl_target_ms"] == 20 and record["prefill_share"] > 0
    assert chart.read_bytes().startswith(b"\x89PNG")
