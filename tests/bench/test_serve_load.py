"""Arrivals, the concurrency limit, periodic work, and clients that disconnect."""

import asyncio
import math
import random
import statistics
import time

import pytest

from cairn.bench.serve.exchange import Outcome
from cairn.bench.serve.load import Leavers, Pace, drive, every, run
from cairn.errors import BadConfig


def gaps(**pace):
    rng = random.Random(3)
    return [Pace(count=1, **pace).gap(rng) for _ in range(20_000)]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness):
    found = gaps(rate=5.0, burstiness=burstiness)
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.05)
    # A gamma distribution of shape b has a deviation of mean / sqrt(b).
    assert statistics.stdev(found) == pytest.approx(0.2 / math.sqrt(burstiness), rel=0.05)


def test_an_infinite_rate_has_no_gaps():
    assert set(gaps()) == {0.0}


@pytest.mark.parametrize(
    "pace",
    [
        {},
        {"duration": 3.0},
        {"count": 1, "rate": 0.0},
        {"count": 1, "rate": math.nan},
        {"count": 1, "burstiness": -1.0},
        {"count": 1, "duration": 0.0},
        {"count": 1, "duration": math.inf},
    ],
)
def test_a_pace_that_cannot_be_is_refused(pace):
    with pytest.raises(BadConfig):
        Pace(**pace)


def test_concurrency_is_bounded_and_all_requests_are_sent():
    seen, running, most = [], 0, 0

    async def work(index, due):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        seen.append(index)

    run(drive(Pace(count=50, max_concurrency=4), work))
    assert sorted(seen) == list(range(50))
    assert most == 4


def test_all_at_once_without_a_limit():
    running = most = 0

    async def work(index, due):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    run(drive(Pace(count=50), work))
    assert most == 50


def test_due_is_the_arrival_even_when_the_request_is_held_back():
    late = []

    async def work(index, due):
        late.append(time.perf_counter() - due)
        await asyncio.sleep(0.02)

    run(drive(Pace(rate=1000.0, count=20, max_concurrency=1), work))
    assert late[0] < late[-1]
    assert late[-1] > 0.2


@pytest.mark.parametrize("pace", [{"max_concurrency": 2}, {"rate": 200.0}])
def test_a_duration_ends_the_load_but_not_what_runs(pace):
    ended = []

    async def work(index, due):
        await asyncio.sleep(0.05)
        ended.append(index)

    began = time.perf_counter()
    run(drive(Pace(duration=0.3, **pace), work))
    assert 0.3 <= time.perf_counter() - began < 3
    assert ended == list(range(len(ended))) and len(ended) >= 2


def test_a_duration_ends_a_load_whose_requests_hang():
    begun = []

    async def work(index, due):
        begun.append(index)
        await asyncio.sleep(0.6)

    run(drive(Pace(duration=0.1, max_concurrency=1), work))
    assert begun == [0]


def test_a_duration_does_not_wait_for_an_arrival_after_it():
    async def work(index, due):
        raise AssertionError("nothing arrives in time")

    began = time.perf_counter()
    run(drive(Pace(rate=0.001, duration=0.1), work))
    assert time.perf_counter() - began < 10


def test_a_load_can_be_cancelled_at_any_moment():
    """Also if the next request's slot becomes free in the same iteration of the event loop."""

    async def main():
        task = asyncio.current_task()
        ended = 0

        async def work(index, due):
            nonlocal ended
            ended += 1
            await asyncio.sleep(0)
            if index == 20:
                load.cancel()

        for _ in range(20):
            load = asyncio.create_task(drive(Pace(duration=30.0, max_concurrency=1), work))
            await asyncio.wait([load], timeout=10)
            assert load.cancelled()
        assert not task.cancelling() and ended < 20 * 30

    run(main())


def test_every_calls_at_once_and_again_until_the_end():
    calls = []

    async def call():
        calls.append(time.perf_counter())

    async def main():
        async with every(0.02, call):
            await asyncio.sleep(0.2)
        count = len(calls)
        await asyncio.sleep(0.05)
        assert len(calls) == count

    run(main())
    assert 3 <= len(calls) <= 11


def test_a_failing_call_ends_the_block_with_its_own_error():
    async def call():
        raise BadConfig("out of ink")

    async def main():
        async with every(0.01, call):
            await asyncio.sleep(30)

    with pytest.raises(BadConfig, match="out of ink"):
        run(main())


def test_some_leave_within_the_usual_time_of_their_kind():
    leavers = Leavers(0.3, seed=1)
    for _ in range(200):
        leavers.learn(Outcome("slow", sent=0.0, ended=10.0), None)
        leavers.learn(Outcome("quick", sent=0.0, ended=0.1), None)
    moments = [leavers.leave_after("slow") for _ in range(1000)]
    leaving = [x for x in moments if x is not None]
    assert 0.25 < len(leaving) / 1000 < 0.35
    assert max(leaving) <= 10.0 and statistics.mean(leaving) == pytest.approx(5.0, rel=0.15)
    assert all((x or 0) <= 0.1 for x in (leavers.leave_after("quick") for _ in range(100)))


def test_the_share_that_left_is_the_fraction_although_some_are_served_first():
    leavers, rng, left = Leavers(0.1, seed=1), random.Random(2), 0
    for _ in range(5000):
        leave, takes = leavers.leave_after("x"), rng.expovariate(1.0)
        aborted = leave is not None and leave < takes
        ended = Outcome("x", sent=0.0, ended=leave if aborted else takes, aborted=aborted)
        leavers.learn(ended, leave)
        left += aborted
    assert left / 5000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("fraction, leaves", [(0.0, False), (1.0, True)])
def test_leave_fractions_of_0_and_1(fraction, leaves):
    leavers = Leavers(fraction, seed=1)
    assert all((leavers.leave_after("") is not None) == leaves for _ in range(100))
