import time

import pytest
import torch

from cairn.bench import timing
from cairn.ops.testing import Arguments

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_clock_gives_the_median_seconds_of_one_call(monkeypatch):
    now = 0.0
    took = iter([9.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, *[4.0] * 100])

    def call():
        nonlocal now
        now += next(took)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timed = timing.measure_calls([call, call], "cpu", budget=0.0)
    # The first call warms up; passes of two calls take 3, 10 and 17 seconds.
    assert timed == timing.Timing(5.0, "clock")


def test_arguments_rotate_until_they_exceed_the_cache():
    given = Arguments((torch.arange(1 << 20),), {"scale": 2})
    seen = []
    calls = timing.rotated(lambda x, scale: seen.append((x, scale)), given, touched=8 << 20)
    for call in calls:
        call()
    assert len(calls) == timing.COPIES["cpu"]
    assert len({x.data_ptr() for x, _ in seen}) == len(calls)
    assert all(torch.equal(x, given.args[0]) and scale == 2 for x, scale in seen)


def test_a_call_never_finds_what_it_left_in_the_cache():
    given = Arguments((torch.empty(1 << 20),))
    assert len(timing.rotated(torch.neg, given, touched=1 << 30)) == 2


def test_arguments_that_fill_the_memory_are_not_copied(monkeypatch):
    monkeypatch.setitem(timing.MEMORY, "cpu", 5 << 20)
    given = Arguments((torch.empty(1 << 20),))
    assert len(timing.rotated(torch.neg, given, touched=1 << 30)) == 1


@pytest.mark.parametrize(
    ("microseconds", "different", "calls"),
    [(1, 32, 64), (100, 1, 64), (218, 1, 46), (218, 50, 50), (4000, 2, 3), (20_000, 1, 1)],
)
def test_graphs_last_long_enough(microseconds, different, calls):
    assert timing.held(microseconds * 1e-6, different) == calls


@pytest.mark.gpu
@GPU
def test_the_host_is_timed_without_the_device():
    x = torch.randn(1 << 24, device="cuda")

    def call():
        time.sleep(1e-4)
        return x.sin().cos().sin().cos()

    assert 1e-4 < timing.host_seconds(call) < 5e-4
    assert timing.host_seconds(lambda: x.sum().item()) is None


@pytest.mark.gpu
@GPU
def test_a_call_is_replayed_and_one_that_waits_is_not():
    x = torch.randn(1 << 20, device="cuda")
    replayed = timing.measure_calls([lambda: x + 1], "cuda", budget=0.02)
    assert replayed.how == "graph"
    assert 1e-6 < replayed.seconds < 1e-4
    assert timing.measure_calls([lambda: float((x + 1).sum())], "cuda", budget=0.02).how == "stream"
    assert timing.kernels(lambda: (x + 1) * 2) == 2
