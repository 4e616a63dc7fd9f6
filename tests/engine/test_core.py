"""Concurrent requests, some of which end, fail or are aborted."""

from __future__ import annotations

import random

import pytest

from cairn.types import SamplingParams
from tests.engine.fakes import all_pages_back, drain, fake_core, next_token


@pytest.fixture
def seconds() -> list[float]:
    return [0.0]


def timed_core(seconds, **options):
    core = fake_core(pages=400, step_slots=512, **options)
    core.clock = lambda: seconds[0]
    return core


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_and_moments_while_requests_come_and_go(seconds, overlap):
    """When a request ends or is aborted, the others continue unchanged; each records when it got
    its last token."""
    rng = random.Random(overlap)
    core, live, last, done = timed_core(seconds, overlap=overlap), {}, {}, []
    for step in range(250):
        if len(live) < 5 and step < 200 and rng.random() < 0.4:
            name = f"r{step}"
            live[name] = core.add(name, [1] * rng.randrange(1, 30), params(rng.randrange(1, 60)))
        if live and rng.random() < 0.05:
            name = rng.choice(list(live))
            core.abort(name)
            done.append(live.pop(name))
        taken = {name: len(c.stream.output.token_ids) for name, c in live.items()}
        seconds[0] += 1.0
        moved = core.step()
        for name, continuation in list(live.items()):
            grown = len(continuation.stream.output.token_ids) > taken[name]
            assert grown == any(one is continuation for one in moved)
            if grown:
                last[name] = seconds[0]
            if continuation.finished:
                done.append(live.pop(name))
    drain(core)
    done += live.values()
    assert len(done) > 20
    for continuation in done:
        name, output = continuation.request.id, continuation.stream.output
        assert output.token_ids == [next_token(name, i) for i in range(len(output.token_ids))]
        assert output.finish_reason == "abort" or len(output.token_ids) > 0
        if name in last and continuation.moments.ended <= 250:
            assert continuation.moments.last_token == last[name]
    assert all_pages_back(core)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_request_without_a_possible_token_leaves_the_others(seconds, overlap, at):
    """At any position in its page, the next step, which may be running already, adds the invalid
    token."""
    core = timed_core(seconds, overlap=overlap)
    core.executor.next_token = lambda name, i: -1 if (name, i) == ("bad", at) else i
    bad = core.add("bad", [1] * 3, params(20))
    good = core.add("good", [1] * 3, params(20))
    drain(core)
    assert bad.stream.output.token_ids == list(range(at))
    assert (bad.stream.output.finish_reason, bad.error) != ("length", None)
    assert "NaN" in bad.error
    # A step that was already running computed it, so the page is not part of a cached prompt.
    assert bad.request.tokens.tolist() == [1] * 3 + list(range(at)) + [-1]
    assert good.stream.output.token_ids == list(range(20))
    assert all_pages_back(core)


def test_a_name_that_is_used_again_while_its_step_runs(seconds):
    core = timed_core(seconds, overlap=True)
    first, other = core.add("a", [1] * 5, params(20)), core.add("b", [1] * 5, params(20))
    for _ in range(6):
        core.step()
    core.abort("a")
    kept = list(first.stream.output.token_ids)
    again = core.add("a", [2] * 5, params(3))
    drain(core)
    assert first.stream.output.token_ids == kept
    assert again.stream.output.token_ids == [next_token("a", i) for i in range(3)]
    assert len(other.stream.output.token_ids) == 20
