"""The scheduler through an engine whose executor checks every plan."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cache.invariants import check
from cairn.engine.continuation import Continuation
from cairn.engine.core import EngineCore
from cairn.engine.planned_step import Limits
from cairn.errors import InvariantError
from cairn.runner.step import Launched, StepPlan
from cairn.types import SamplingParams
from tests.engine.fakes import VOCAB, FakeDrafter, all_pages_back, drain, fake_core, next_token


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int, **options) -> Continuation:
    return core.add(name, prompt, SamplingParams(max_tokens=max_tokens), **options)


def expected(continuation: Continuation) -> list[int]:
    count = continuation.request.max_output
    return [next_token(continuation.request.id, i) for i in range(count)]


def check_ledger(core: EngineCore) -> None:
    check(core.cache, [r.lease for r in core.scheduler.running if r.lease is not None])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([2, 4, 16, 64]),
    landmarks=st.booleans(),
    pages=st.sampled_from([12, 20, 60]),
    rows=st.sampled_from([1, 2, 5, 16]),
    step_slots=st.sampled_from([1, 2, 7, 64, 1000]),
    prefix_caching=st.booleans(),
    window=st.sampled_from([None, 0, 2]),
    beside=st.sampled_from([None, "no snapshots", "snapshots", 0.0, 0.6, 1.0]),
)
def test_every_request_ends_with_its_own_tokens(
    seed, page_size, landmarks, pages, rows, step_slots, prefix_caching, window, beside
):
    """An engine with pages, and also states of recurrent layers, or drafts of which a share is
    right."""
    rng = random.Random(seed)
    drafter = FakeDrafter(seed, beside) if isinstance(beside, float) else None
    core = fake_core(
        page_size=page_size,
        landmarks=landmarks,
        pages=pages,
        rows=rows,
        step_slots=step_slots,
        prefix_caching=prefix_caching,
        # Enough for one sequence's largest step.
        window_pages=0 if window is None else min(window + step_slots // page_size + 2, pages),
        reach=window or 0,
        snapshots={"no snapshots": 0, "snapshots": 3}.get(beside),
        drafter=drafter,
    )
    longest = core.shape.max_model_len
    live = []
    for k in range(25):
        length = rng.randint(1, min(longest - 1, 4 * page_size))
        shared = rng.randint(0, length)
        prompt = [i % 3 for i in range(shared)]
        prompt += [rng.randrange(VOCAB) for _ in range(length - shared)]
        live.append(
            add(core, f"r{k}", prompt, rng.randint(1, 3 * page_size), priority=rng.randint(0, 1))
        )
        if drafter is not None:
            drafter.knows(prompt, expected(live[-1]))
        for _ in range(rng.randint(0, 3)):
            core.step()
            check_ledger(core)
    drain(core)
    for continuation in live:
        assert continuation.stream.output.finish_reason == "length"
        assert continuation.stream.output.token_ids == expected(continuation)
    assert all_pages_back(core)
    check_ledger(core)


def test_retraction_under_page_pressure_loses_nothing():
    core = fake_core(page_size=4, pages=16, rows=8, max_model_len=40)
    live = [add(core, f"r{k}", [k, k, k], max_tokens=30) for k in range(6)]
    while core.has_work:
        core.step()
        check_ledger(core)
    assert core.scheduler.preemptions > 0
    for continuation in live:
        assert continuation.stream.output.token_ids == expected(continuation)
    assert all_pages_back(core)


def test_rows_that_fill_the_pool_to_the_last_page_run_side_by_side():
    # Three tokens per page: 7 of the prompt and the first 2 of 3 generated ones are three pages.
    core = fake_core(page_size=4, pages=15, rows=5, max_model_len=10)
    live = [add(core, f"r{k}", [k] * 7, max_tokens=3) for k in range(5)]
    most = 0
    while core.has_work:
        core.step()
        check_ledger(core)
        most = max(most, len(core.scheduler.running))
    assert most == 5
    assert core.scheduler.preemptions == 0
    for continuation in live:
        assert continuation.stream.output.token_ids == expected(continuation)


def test_lower_priority_is_retracted_first():
    core = fake_core(page_size=4, pages=16, rows=8, max_model_len=40)
    low = [add(core, f"low{k}", [k], max_tokens=30, priority=1) for k in range(3)]
    high = [add(core, f"high{k}", [5 + k], max_tokens=12, priority=0) for k in range(3)]
    drain(core)
    assert sum(c.request.retractions for c in low) > 0
    assert all(c.request.retractions == 0 for c in high)


def test_a_prompt_that_is_first_in_order_keeps_its_pages_while_it_loads():
    """It was admitted with rows that grow faster, and in an earlier step."""
    core = fake_core(page_size=16, pages=70, rows=9, step_slots=16, prefix_caching=False)
    low = [add(core, f"low{k}", [k], max_tokens=150, priority=1) for k in range(8)]
    while not all(one.stream.output.token_ids for one in low):
        core.step()
    high = add(core, "high", [9] * 600, max_tokens=20, priority=0)
    while core.has_work:
        core.step()
        check_ledger(core)
    assert high.request.retractions == 0
    assert sum(one.request.retractions for one in low) > 0
    for one in (high, *low):
        assert one.stream.output.token_ids == expected(one)
    assert all_pages_back(core)


def test_a_request_that_was_refused_pages_starts_once_a_row_ends():
    """The row had many promised pages and frees few: as many as others took meanwhile."""
    core = fake_core(page_size=16, pages=66, rows=4, step_slots=256, prefix_caching=False)
    core.scheduler.limits = Limits(4, 256, step_seconds=1.0)
    # Beside a page of one prompt, a step has time for the cheap first tokens of another.
    core.scheduler.times.room = lambda load, first, limit: 160 if load.chunks else 16
    long = add(core, "long", [1], max_tokens=900)
    core.step()
    passing = add(core, "passing", [2] * 870, max_tokens=1)
    core.step()
    waiting = add(core, "waiting", [3] * 120, max_tokens=5)
    while not passing.finished:
        core.step()
        assert waiting.request.row < 0
    core.step()
    assert not long.finished
    assert waiting.request.row >= 0
    drain(core)
    assert all_pages_back(core)


def test_smaller_priority_number_starts_first():
    core = fake_core(rows=1)
    for name, priority in (("c", 2), ("a", 0), ("b", 1)):
        add(core, name, [1], max_tokens=1, priority=priority)
    ended = []
    while core.has_work:
        ended += [c.request.id for c in core.step() if c.finished]
    assert ended == ["a", "b", "c"]


def test_decode_goes_on_while_a_long_prompt_loads():
    core = fake_core(page_size=16, pages=400, step_slots=32)
    short = add(core, "short", [1], max_tokens=40)
    core.step()
    long = add(core, "long", [2] * 1000, max_tokens=1)
    before = len(short.stream.output.token_ids)
    for _ in range(20):
        core.step()
    assert len(short.stream.output.token_ids) == before + 20
    assert 0 < long.request.computed < 1000


@pytest.mark.parametrize("decoding", [0, 1, 2, 5, 15])
def test_a_step_is_as_long_as_it_may_be_and_no_longer(decoding, monkeypatch):
    core = fake_core(page_size=16, pages=400, rows=20, step_slots=64, prefix_caching=False)
    for k in range(decoding):
        add(core, f"r{k}", [k % VOCAB], max_tokens=200)
    core.step()
    count, launch, seen = core.scheduler.slots.slots_for, core.executor.launch, []

    def see(plan: StepPlan) -> Launched:
        works = plan.row_by_row()
        seen.append(sum(count(w.first + w.num_tokens) - count(w.first) for w in works))
        return launch(plan)

    monkeypatch.setattr(core.executor, "launch", see)
    long = add(core, "long", [2] * 1500, max_tokens=1)
    while not long.finished:
        core.step()
    # A landmark without room waits, and so does the token before it.
    assert set(seen[:-2]) <= {63, 64}
    assert seen[-2] <= 64


def test_equal_prompts_are_computed_once():
    core = fake_core(page_size=16, pages=400, rows=8, step_slots=64)
    prompt = [i % 7 for i in range(500)]
    live = [add(core, f"r{k}", prompt, max_tokens=2) for k in range(4)]
    drain(core)
    reusable = (500 - 1) // 15 * 15
    assert [c.request.cached for c in live] == [0, reusable, reusable, reusable]
    assert core.stats.prefill_tokens == 500 + 3 * (500 - reusable)


def test_a_prompt_that_fills_its_last_page_still_runs_its_last_token():
    core = fake_core(page_size=4, pages=64)
    first = add(core, "a", [1] * 12, max_tokens=2)
    drain(core)
    second = add(core, "b", [1] * 12, max_tokens=2)
    drain(core)
    assert first.request.cached == 0
    assert second.request.cached == 9
    assert second.stream.output.token_ids == expected(second)


def test_abort_storm():
    """20,000 requests aborted in random states: one final result each, and all pages are freed."""
    rng = random.Random(7)
    core = fake_core(page_size=16, pages=200, rows=32, step_slots=256)
    live: list[Continuation] = []
    ended: dict[str, int] = {}

    def count(continuations: list[Continuation]) -> None:
        for c in continuations:
            if c.finished:
                ended[c.request.id] = ended.get(c.request.id, 0) + 1

    made = 0
    while made < 20_000 or core.has_work:
        for _ in range(rng.randint(1, 60)):
            if made < 20_000:
                length = rng.randint(1, 200)
                prompt = [(made // 50 + i) % VOCAB for i in range(length)]
                live.append(add(core, f"r{made}", prompt, max_tokens=rng.randint(1, 40)))
                made += 1
        count(core.step())
        rng.shuffle(live)
        for continuation in [live.pop() for _ in range(min(len(live), rng.randint(0, 60)))]:
            if not continuation.finished:
                core.abort(continuation.request.id)
                ended[continuation.request.id] = ended.get(continuation.request.id, 0) + 1
                assert continuation.stream.output.finish_reason == "abort"
    assert len(ended) == 20_000
    assert set(ended.values()) == {1}
    assert all_pages_back(core)
    assert core.scheduler.running == []
    check_ledger(core)


class _AbortsWhileRunning:
    """An executor during whose step a request is aborted."""

    def __init__(self, inner, during):
        self.inner = inner
        self.during = during

    def launch(self, plan: StepPlan) -> Launched:
        self.during(plan)
        return self.inner.launch(plan)


@pytest.mark.parametrize("overlap", [False, True])
def test_window_pages_in_use_do_not_grow_with_the_context(overlap):
    """Prefill and decode hold the window pages of a step and of the window before it; with overlap
    also those of the running step."""
    held = {}
    for length in (100, 3000):
        core = fake_core(
            pages=1200, step_slots=64, overlap=overlap, window_pages=200, prefix_caching=False
        )
        add(core, "a", [1] * length, max_tokens=50)
        most = 0
        while core.has_work:
            core.step()
            most = max(most, 200 - core.cache.window.num_free)
        held[length] = most
    assert held[100] == held[3000] <= 2 + (1 + overlap) * 64 // 4 + 2


def test_rows_wait_for_window_pages_rather_than_take_each_others():
    """Eight long prompts need three window pages each while they decode, and a step's pages at
    once."""
    core = fake_core(pages=2000, rows=8, step_slots=32, window_pages=20, max_model_len=900)
    live = [add(core, f"r{k}", [k] * 400, max_tokens=60) for k in range(8)]
    most = 0
    while core.has_work:
        core.step()
        check_ledger(core)
        most = max(most, len(core.scheduler.running))
    assert 2 <= most < 8
    assert core.scheduler.preemptions == 0
    for one in live:
        assert one.stream.output.token_ids == expected(one)
    assert all_pages_back(core)


def test_abort_in_flight_releases_pages_only_when_the_step_retires():
    core = fake_core(page_size=4, pages=32)
    seen = []

    def during(plan):
        if "a" in core._live and plan.step_id == 2:
            owned = core.cache.num_owned
            core.abort("a")
            seen.append(core.cache.num_owned == owned)

    core.executor = _AbortsWhileRunning(core.executor, during)
    aborted = add(core, "a", [1] * 10, max_tokens=50)
    other = add(core, "b", [2] * 10, max_tokens=20)
    drain(core)
    assert seen == [True]
    assert aborted.stream.output.finish_reason == "abort"
    assert other.stream.output.token_ids == expected(other)
    assert all_pages_back(core)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on():
    core = fake_core(page_size=4, pages=32)
    good = core.executor

    class Failing:
        def launch(self, plan):
            good.launch(plan)
            raise RuntimeError("the device is gone")

    failed = add(core, "a", [1] * 10, max_tokens=5)
    core.executor = Failing()
    with pytest.raises(RuntimeError, match="device is gone"):
        core.step()
    assert failed.stream.output.finish_reason == "error"
    assert all_pages_back(core)
    core.executor = good
    after = add(core, "b", [1] * 10, max_tokens=5)
    drain(core)
    assert after.stream.output.token_ids == expected(after)


def test_a_request_without_a_drawable_token_ends_alone():
    core = fake_core(page_size=4, pages=32)
    core.executor.next_token = lambda name, i: -1 if (name, i) == ("a", 2) else next_token(name, i)
    broken = add(core, "a", [1] * 10, max_tokens=9)
    other = add(core, "b", [2] * 10, max_tokens=9)
    drain(core)
    assert broken.stream.output.finish_reason == "error"
    assert len(broken.stream.output.token_ids) == 2
    assert other.stream.output.token_ids == expected(other)
    assert all_pages_back(core)


def test_the_fake_executor_refuses_impossible_plans():
    core = fake_core(page_size=4, pages=32)
    add(core, "a", [1] * 10, max_tokens=5)
    plan = core.scheduler.schedule()
    with pytest.raises(InvariantError, match="granted page"):
        core.executor.launch(StepPlan(plan.step_id, plan.closed, plan.opened, (), plan.work))
