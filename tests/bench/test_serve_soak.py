"""`cairn bench soak`: mix of requests, processes, slopes, record."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cairn.bench.serve.client import ServerAddress
from cairn.bench.serve.lengths import Lengths
from cairn.bench.serve.load import run
from cairn.bench.serve.mix import WEIGHTS, open_mix
from cairn.bench.serve.processes import ProcessState, process_tree
from cairn.bench.serve.soak import SoakPlan, run_soak
from cairn.bench.serve.soak_report import Sample, SoakResult, Tally, slope_per_hour
from cairn.cli.main import main
from cairn.errors import BadConfig
from tests.bench.fake_api import FakeApi, tokens_of

# The process reports its own pid: before it runs, it has hardly any memory.
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
# A parent process that leaks memory and descriptors, with a child that does not.
LEAKY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
kept = []
while len(kept) < 400:
    kept.append((bytearray(b"x") * (1 << 20), open("/dev/null")))
    time.sleep(0.02)
time.sleep(60)
"""


@pytest.fixture
def family():
    """A leaking process and its child, which does not leak: (parent, child's pid)."""
    parent = subprocess.Popen([sys.executable, "-c", LEAKY], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    yield parent, child
    for pid in (child, parent.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    parent.wait()
    parent.stdout.close()


async def guess(text):
    return tokens_of(text)


def requests(count, **changes):
    async def make():
        mix = await open_mix(Lengths(guess, 0.25, "guess", False), **({"long_len": 4000} | changes))
        return [await mix.request(i) for i in range(count)], mix

    return asyncio.run(make())


def test_the_mix_holds_every_kind_in_its_share():
    found, mix = requests(2000, seed=1)
    counts = Counter(x.kind for x in found)
    for kind, share in WEIGHTS.items():
        assert counts[kind] / 2000 == pytest.approx(share / 100, abs=0.03)
    assert 0.15 < sum(not x.stream for x in found) / 2000 < 0.25
    by_kind = {kind: [x for x in found if x.kind == kind] for kind in WEIGHTS}
    assert all(x.chat for x in by_kind["chat"])
    assert {x.n for x in by_kind["several"]} == {2, 3, 4}
    assert all(x.stop for x in by_kind["stop"])
    assert all(x.prompt.startswith(mix.prefixes) for x in by_kind["prefix"])
    longest = [x.input_len for x in by_kind["long"]]
    assert 1000 <= min(longest) < 2000 < max(longest) <= 4000
    assert requests(5, seed=1)[0] == found[:5]
    assert requests(5, seed=2)[0] != found[:5]


def test_a_mix_of_short_prompts_only_is_refused():
    with pytest.raises(BadConfig, match="10"):
        requests(1, seed=1, long_len=10)


def test_the_processes_of_a_server_are_found(family):
    parent, child = family
    found = process_tree(parent.pid)
    assert [state.pid for state in found] == [parent.pid, child]
    assert all(state.rss > 1 << 20 and state.fds >= 3 for state in found)
    assert found[0].command.startswith(Path(sys.executable).name)
    os.kill(child, 9)
    end = time.monotonic() + 10
    while len(process_tree(parent.pid)) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    # The parent has not waited for the child: a zombie counts as ended.
    assert [state.pid for state in process_tree(parent.pid)] == [parent.pid]
    parent.kill()
    parent.wait()
    assert process_tree(parent.pid) == []


def test_slope():
    seconds = [0, 60, 120, 180, 240]
    assert slope_per_hour(seconds, [100, 101, 102, 103, 104]) == pytest.approx(60)
    assert slope_per_hour(seconds, [5.0] * 5) == pytest.approx(0, abs=1e-9)
    assert slope_per_hour(seconds[:4], [1, 2, 3, 4]) is None


def sample(at, rss=100, fds=10, leaked=0.0, pid=7):
    return Sample(at, {pid: ProcessState(pid, "python serve", rss, fds)}, {"leaked_pages": leaked})


def result(samples, warmup, before=None, after=None):
    return SoakResult(
        "m", warmup, 3600.0, Tally(), samples, before or samples[0], after or samples[-1], False
    )


def test_the_trend_leaves_the_warm_up_out():
    grown = [sample(t, rss=int(1e6 * t)) for t in range(0, 600, 10)]
    level = [sample(t, rss=int(6e8), fds=20 + t % 3) for t in range(600, 3600, 10)]
    found = result(grown + level, 600, sample(0, fds=10), sample(3600, fds=12))
    (trend,) = found.trends()
    assert trend.rss_mb_per_hour == pytest.approx(0)
    assert trend.rss_mb == (600.0, 600.0)
    assert trend.fds_under_load == (20, 22)
    assert trend.fds_at_rest == (10, 12)
    assert result(grown + level, 0).trends()[0].rss_mb_per_hour > 100


def test_the_series_is_thinned_and_keeps_who_came_later():
    samples = [sample(t) for t in range(900)] + [sample(t, pid=8) for t in range(900, 1000)]
    series = result(samples, 0).series()
    assert len(series.seconds) == 200
    assert series.seconds[:3] == (0, 5, 10)
    assert [p.pid for p in series.processes] == [7, 8]
    assert series.processes[0].fds[0] == 10 and series.processes[0].fds[-1] is None
    assert series.processes[1].rss_mb[0] is None and series.processes[1].rss_mb[-1] is not None


def test_leaked_pages_are_seen_under_load_and_at_rest():
    found = result([sample(0), sample(1, leaked=5.0), sample(2)], 0)
    assert found.leaked_pages() == (5.0, 0.0)
    assert "leaked pages: 5 at most" in found.lines()[-1]


def test_a_soak(monkeypatch, capsys, tmp_path, family):
    parent, child = family
    path, chart = tmp_path / "records.json", tmp_path / "soak.png"
    with FakeApi(pace=0.002, leaked=0, status={30: 500}) as api:
        given = ["bench", "soak", "--base-url", api.url, "--pid", str(parent.pid)]
        given += ["--duration", "2", "--interval", "0.1", "--warmup", "0.3"]
        given += [
            "--long-input-len",
            "500",
            "--settle",
            "0.1",
            "--output",
            str(path),
            "--chart",
            str(chart),
        ]
        monkeypatch.setattr(sys, "argv", ["cairn", *given])
        with pytest.raises(SystemExit) as end:
            main(given)
        assert end.value.code == 0
        assert api.most_running <= 8
        assert api.cut_off > 0
    (record,) = json.loads(path.read_text())
    assert record["phase"] == "soak" and record["concurrency"] == 8
    assert set(record["completed"]) == set(WEIGHTS)
    assert sum(record["aborted"].values()) > 0
    assert record["errors"] == {"HTTP 500": 1}
    assert record["leaked_pages_most"] == record["leaked_pages_at_rest"] == 0
    leaky, quiet = record["processes"]
    assert (leaky["pid"], quiet["pid"]) == (parent.pid, child)
    assert leaky["rss_mb_per_hour"] > 1000 and abs(quiet["rss_mb_per_hour"]) < 1
    assert leaky["fds_at_rest"][1] > leaky["fds_at_rest"][0]
    assert quiet["fds_at_rest"][1] == quiet["fds_at_rest"][0]
    assert len(record["series"]["seconds"]) >= 5
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "MB/h" in capsys.readouterr().out


def test_a_process_that_has_ended_cannot_be_watched(family):
    parent, _ = family
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    with FakeApi() as api:
        plan = SoakPlan(ServerAddress(api.url), 30.0, parent.pid, interval=0.1, settle=0.1)
        # Until its parent waits for it, it is a zombie, which counts as ended.
        with pytest.raises(BadConfig, match="no process"):
            run(run_soak(plan))


def test_a_server_that_ends_during_the_soak(family):
    _, child = family
    with FakeApi() as api:
        plan = SoakPlan(ServerAddress(api.url), 30.0, child, interval=0.1, settle=0.1)

        async def kill_later():
            await asyncio.sleep(1.0)
            os.kill(child, 9)

        async def both():
            return (await asyncio.gather(run_soak(plan), kill_later()))[0]

        found = run(both())
    assert found.ended and found.seconds < 15
    assert found.samples and not found.samples[-1].processes
    assert any("ended during the load" in line for line in found.lines())


@pytest.mark.parametrize(
    "changes",
    [
        {"abort_fraction": 2.0},
        {"interval": 0.0},
        {"duration": 5.0},
        {"warmup": 4000.0},
        {"warmup": -1.0},
    ],
)
def test_plans_that_cannot_be_are_refused(changes):
    with pytest.raises(BadConfig):
        SoakPlan(ServerAddress(), **changes)
