"""Deltas for a consumer that is slower than its request."""

import asyncio
from types import SimpleNamespace

import pytest

from cairn.engine.messages import Delta, Position, Positions, Timing, joined
from cairn.engine.submission import Submission

SCORES = Position((7,), (-0.5,), (1,))
PROMPT = (Positions(b"", b"", b""),)


def step(number: int, index: int = 0, **more) -> Delta:
    return Delta("a", index, text=f"{number} ", token_ids=(number,), **more)


def consumed(submission: Submission, count: int) -> list[Delta]:
    async def take():
        return [await anext(submission) for _ in range(count)]

    return asyncio.run(asyncio.wait_for(take(), 5))


def test_steps_that_wait_come_as_one():
    submission = Submission(None, "a", 1)
    for number in range(5):
        submission.take(step(number))
    [delta] = consumed(submission, 1)
    assert delta == Delta("a", 0, text="0 1 2 3 4 ", token_ids=(0, 1, 2, 3, 4))


def test_fast_consumers_get_one_delta_per_step():
    async def run():
        submission, got = Submission(None, "a", 1), []

        async def consume():
            async for delta in submission:
                got.append(delta)

        task = asyncio.create_task(consume())
        for number in range(4):
            submission.take(step(number, finish_reason="length" if number == 3 else None))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await task
        return got

    assert [delta.token_ids for delta in asyncio.run(run())] == [(0,), (1,), (2,), (3,)]


def test_continuations_stay_apart():
    submission = Submission(None, "a", 2)
    for number in range(3):
        submission.take(step(number))
        submission.take(step(10 + number, 1))
    first, second = consumed(submission, 2)
    assert (first.index, first.token_ids) == (0, (0, 1, 2))
    assert (second.index, second.token_ids) == (1, (10, 11, 12))


def test_nothing_that_steps_report_is_lost():
    timing = Timing(0.1, 0.2, 0.3)
    whole = joined(
        [
            step(1, logprobs=(SCORES,), prompt_logprobs=PROMPT, cached_tokens=3),
            Delta("a", 0),
            step(2, logprobs=(SCORES,), selection=(((),),)),
            step(3, finish_reason="stop", stop_reason="x", timing=timing),
        ]
    )
    assert whole == Delta(
        "a",
        0,
        text="1 2 3 ",
        token_ids=(1, 2, 3),
        logprobs=(SCORES, SCORES),
        selection=(((),),),
        prompt_logprobs=PROMPT,
        cached_tokens=3,
        finish_reason="stop",
        stop_reason="x",
        timing=timing,
    )


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_deltas_before_a_failure_come_first(reason):
    submission = Submission(None, "a", 1)
    submission.take(step(1))
    submission.take(step(2))
    submission.take(Delta("a", 0, finish_reason=reason, error="no memory"))
    good, failed = consumed(submission, 2)
    assert (good.token_ids, good.finish_reason) == ((1, 2), None)
    assert (failed.token_ids, failed.finish_reason, failed.error) == ((), reason, "no memory")


def test_cancelling_drops_pending_deltas():
    aborted = []
    submission = Submission(SimpleNamespace(abort=aborted.append), "a", 1)
    submission.take(step(1))
    submission.cancel()

    async def rest():
        return [delta async for delta in submission]

    assert asyncio.run(rest()) == []
    assert aborted == ["a"]
