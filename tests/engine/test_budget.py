"""Steps with a time target, under a clock that only steps advance."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.budget import GROWTH, Load, StepTimes
from cairn.engine.continuation import Continuation
from cairn.engine.core import EngineCore
from cairn.engine.planned_step import Limits
from cairn.runner.step import Launched, StepPlan, StepResult
from cairn.types import SamplingParams
from tests.engine.fakes import VOCAB, all_pages_back, drain, fake_core
from tests.engine.harness import difference, engine, greedy, trace

Cost = Callable[[Load], float]
PAGE = 16


def true_cost(load: Load) -> float:
    """Seconds of a step on a simulated machine."""
    decode = 4e-3 + 5e-4 * load.rows + 1e-7 * load.rows_context
    return decode + 2e-3 * load.chunks + 1e-4 * load.tokens + 2e-9 * load.context


def decode_load(rows: int, context: int) -> Load:
    return Load(rows, rows * context)


def mixed_load(rows: int, context: int, tokens: int, first: int) -> Load:
    looked_at = tokens * first + tokens * (tokens - 1) // 2
    return Load(rows, rows * context, 1, tokens, looked_at)


def expected(times: StepTimes, load: Load) -> float:
    return times.decode_seconds(load) + times.prefill_seconds(load)


def taught(noise: float = 0.0, seed: int = 0, scale: float = 1.0) -> StepTimes:
    """A cost model after some hundred steps of the simulated machine."""
    rng, times = random.Random(seed), StepTimes()
    for k in range(300):
        load = decode_load(rng.randint(1, 16), rng.randint(10, 20_000))
        if k % 3 == 0:
            load = mixed_load(load.rows, 500, rng.randint(16, 1024), rng.randint(0, 60_000))
        times.observe(load, scale * true_cost(load) * rng.lognormvariate(0, noise))
    return times


LOADS = [
    decode_load(1, 100),
    decode_load(8, 5000),
    mixed_load(8, 5000, 100, 0),
    mixed_load(8, 5000, 600, 30_000),
    mixed_load(0, 0, 1024, 10_000),
]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("load", LOADS)
def test_steps_are_predicted_on_fast_and_slow_machines(load, scale):
    assert expected(taught(scale=scale), load) == pytest.approx(scale * true_cost(load), rel=0.02)


@pytest.mark.parametrize("load", LOADS[1:])
def test_noise_averages_out(load):
    found = [expected(taught(0.2, seed), load) / true_cost(load) for seed in range(20)]
    assert np.mean(found) == pytest.approx(1.0, rel=0.1)
    assert 0.6 < min(found) < max(found) < 1.6


def test_one_slow_step_hardly_counts_and_slow_steps_in_a_row_do():
    times, load = taught(), mixed_load(8, 5000, 300, 20_000)
    before = expected(times, load)
    times.observe(load, 100 * before)
    assert expected(times, load) < 1.5 * before
    for _ in range(60):
        times.observe(load, 4 * before)
    assert expected(times, load) == pytest.approx(4 * before, rel=0.25)
    for _ in range(60):
        times.observe(load, before)
    assert expected(times, load) == pytest.approx(before, rel=0.1)


def test_a_first_step_of_seconds_is_forgotten_soon():
    """Slow first steps (compilation, loading) must not delay a prompt for long."""
    times = StepTimes()
    times.observe(mixed_load(0, 0, 2000, 0), 10.0)
    times.observe(decode_load(8, 500), 3.0)
    for k in range(15):
        load = mixed_load(8, 500, 64, 64 * k)
        times.observe(load, true_cost(load))
    assert times.room(decode_load(8, 500), 1000, 0.05) > 200


def test_hours_of_decoding_do_not_wear_out_what_is_known_of_prefill():
    times, load = taught(), mixed_load(0, 0, 500, 20_000)
    before = times.prefill_seconds(load)
    for k in range(20_000):
        one = decode_load(4, 1000 + k)
        times.observe(one, true_cost(one))
    assert times.prefill_seconds(load) == before


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 64), st.integers(0, 10**6), st.integers(0, 8192), st.integers(0, 10**6),
            st.floats(0, 1e3),
        ),
        max_size=30,
    ),
    limit=st.floats(1e-6, 10),
)  # fmt: skip
def test_costs_are_finite_and_bounded_for_any_measurements(steps, limit):
    times = StepTimes()
    longest = 0
    for rows, context, tokens, first, seconds in steps:
        load = mixed_load(rows, context, tokens, first) if tokens else decode_load(rows, context)
        times.observe(load, seconds)
        longest = max(longest, tokens)
        assert 0 <= times.decode_seconds(load) < 1e9
        assert 0 <= times.prefill_seconds(load) < 1e9
        assert 0 <= times.prefill_part(load, seconds) <= seconds
        room = times.room(decode_load(rows, context), first, limit)
        assert 0 <= room <= GROWTH * longest
        assert times.room(decode_load(rows, context), first, 2 * limit) >= room


@pytest.mark.parametrize("first", [0, 10_000, 60_000])
@pytest.mark.parametrize("limit", [0.03, 0.06, 0.11])
def test_room_is_what_fits(limit, first):
    times = taught()
    room = times.room(decode_load(8, 5000), first, limit)
    fits = mixed_load(8, 5000, room, first)
    assert expected(times, fits) <= limit * (1 + 1e-9)
    assert expected(times, mixed_load(8, 5000, room + 2, first)) > limit


def test_no_leap_beyond_what_has_run():
    times = StepTimes()
    assert times.room(decode_load(1, 10), 0, 1.0) == 0
    times.observe(mixed_load(0, 0, 50, 0), 0.001)
    times.observe(decode_load(1, 50), 0.001)
    assert times.room(decode_load(1, 50), 0, 1e6) == GROWTH * 50
    assert times.room(mixed_load(1, 50, 30, 0), 0, 1e6) == GROWTH * 50 - 30


def test_prefill_part():
    times = StepTimes()
    assert times.prefill_part(decode_load(3, 10), 1.0) == 0
    assert times.prefill_part(mixed_load(0, 0, 10, 0), 1.0) == 1
    # Nothing is known about decode steps, so the limit is in tokens.
    assert times.prefill_part(mixed_load(3, 10, 9, 0), 1.0) == 0.75
    for _ in range(10):
        times.observe(decode_load(3, 10), 0.2)
    assert times.prefill_part(mixed_load(3, 10, 9, 0), 1.0) == pytest.approx(0.8, rel=0.01)
    assert times.prefill_part(mixed_load(3, 10, 9, 0), 0.1) == 0


class Later:
    """A step that ends at a time of the simulated clock."""

    def __init__(self, machine: Machine, end: float, step: Launched) -> None:
        self.machine, self.end, self.step = machine, end, step

    def result(self) -> StepResult:
        self.machine.now = max(self.machine.now, self.end)
        return self.step.result()


class Machine:
    """A device whose steps take the time of `cost`, and which records their loads."""

    def __init__(self, core: EngineCore, cost: Cost = true_cost) -> None:
        self.inner, self.cost = core.executor, cost
        self.now = 0.0
        self.free = 0.0
        self.steps: list[tuple[Load, float]] = []
        core.executor, core.clock = self, lambda: self.now

    def launch(self, plan: StepPlan) -> Launched:
        load = Load()
        for work in plan.row_by_row():
            load.add(work)
        seconds = self.cost(load)
        self.free = max(self.now, self.free) + seconds
        self.steps.append((load, seconds))
        return Later(self, self.free, self.inner.launch(plan))


def timed_core(
    target: float | None, cost: Cost = true_cost, overlap: bool = False
) -> tuple[EngineCore, Machine]:
    core = fake_core(page_size=PAGE, pages=3000, rows=16, max_model_len=40_000, overlap=overlap)
    core.scheduler.limits = Limits(16, 1024, target)
    return core, Machine(core, cost)


def add(core: EngineCore, name: str, length: int, max_tokens: int) -> Continuation:
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    return core.add(name, prompt, SamplingParams(max_tokens=max_tokens))


def streams_and_a_long_prompt(
    target: float | None,
    cost: Cost = true_cost,
    length: int = 30_000,
    overlap: bool = False,
) -> tuple[EngineCore, Machine, Continuation]:
    """Eight streams that have run for a while, then a long prompt until its first token."""
    core, machine = timed_core(target, cost, overlap)
    streams = [add(core, f"s{i}", 100, 5000) for i in range(8)]
    for _ in range(100):
        core.step()
    machine.steps.clear()
    long = add(core, "long", length, 1)
    while not long.finished:
        before = [len(s.stream.output.token_ids) for s in streams]
        core.step()
        assert [len(s.stream.output.token_ids) for s in streams] == [n + 1 for n in before]
    return core, machine, long


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("target", [0.03, 0.06])
def test_streams_keep_their_pace_and_the_prompt_loads(target, overlap):
    _, machine, long = streams_and_a_long_prompt(target, overlap=overlap)
    seconds = np.array([s for _, s in machine.steps])
    assert np.quantile(seconds, 0.99) < 1.1 * target
    assert seconds.max() < 2 * target
    # The available time is used: a step is short of its target by less than a page on average.
    assert np.median(seconds) > 0.9 * target
    assert sum(load.tokens for load, _ in machine.steps) == long.request.num_prompt


def test_pace_on_a_machine_of_uneven_speed():
    rng = random.Random(5)

    def cost(load: Load) -> float:
        return true_cost(load) * rng.lognormvariate(0, 0.25) * (6 if rng.random() < 0.005 else 1)

    _, machine, _ = streams_and_a_long_prompt(0.06, cost)
    seconds = np.array([s for _, s in machine.steps])
    assert np.quantile(seconds, 0.98) < 0.12
    assert 0.04 < np.median(seconds) < 0.08


def test_without_a_target_chunks_are_whole():
    core, machine, _ = streams_and_a_long_prompt(None)
    chunks = [load.tokens for load, _ in machine.steps]
    assert min(chunks[:-1]) >= core.scheduler.slots.tokens_in(1024 - 8 - 8)


def test_alone_the_chunk_is_whole_whatever_the_target():
    core, machine = timed_core(1e-6)
    add(core, "long", 10_000, 1)
    drain(core)
    chunks = [load.tokens for load, _ in machine.steps]
    assert set(chunks[:-1]) == {960}


def test_a_target_that_cannot_be_kept_still_loads_a_page_a_step():
    core, machine, _ = streams_and_a_long_prompt(1e-6, length=300)
    assert [load.tokens for load, _ in machine.steps] == [PAGE - 1] * 20
    drain(core)
    assert all_pages_back(core)


def test_prompts_share_what_the_step_allows():
    """Short prompts are admitted together as long as they fit, in order of arrival."""
    core, machine = timed_core(0.03)
    streams = [add(core, f"s{i}", 100, 500) for i in range(4)]
    for _ in range(60):
        core.step()
    machine.steps.clear()
    arrivals = [add(core, f"a{i}", 60, 2) for i in range(8)]
    while not all(a.finished for a in arrivals):
        core.step()
    first = [a.moments.first_token for a in arrivals]
    assert first == sorted(first)
    mixed = [(load, s) for load, s in machine.steps if load.chunks]
    assert max(load.chunks for load, _ in mixed) > 1
    assert all(s < 1.2 * 0.03 for _, s in mixed)
    assert all(not s.finished for s in streams)


@pytest.mark.parametrize("landmarks", [False, True])
def test_a_chunk_of_four_pages_or_more_ends_with_a_page(landmarks):
    """Chunks that the time limit cuts, at any start; smaller chunks fill the remaining time."""
    core = fake_core(page_size=PAGE, landmarks=landmarks, pages=100, rows=2, step_slots=1024)
    core.scheduler.limits = Limits(2, 1024, step_seconds=1.0)
    slots = core.scheduler.slots
    add(core, "stream", 3, 100)
    core.step()
    rooms = [4 * PAGE - 1, 6 * PAGE + 4, 4 * PAGE, 4 * PAGE - 3, 4 * PAGE + 9, 5 * PAGE + 15]
    long = add(core, "long", 600, 1)
    ends = [0]
    for room in rooms:
        core.scheduler.times.room = lambda load, first, limit, room=room: room
        core.step()
        ends.append(long.request.computed)
        used = int(slots.slots_for(ends[-1])) - int(slots.slots_for(ends[-2]))
        if room < 4 * PAGE:
            # One slot may be left: the last token of a page adds its landmark.
            assert room - 1 <= used <= room
            assert ends[-1] % slots.tokens_per_page != 0
        else:
            assert room - PAGE < used <= room
            assert ends[-1] % slots.tokens_per_page == 0


def test_the_same_times_give_the_same_steps():
    one, other = (streams_and_a_long_prompt(0.05)[1] for _ in range(2))
    assert one.steps == other.steps


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), target=st.floats(1e-4, 0.1), pages=st.sampled_from([40, 300]))
def test_requests_end_with_their_own_tokens_whatever_steps_take(seed, target, pages):
    rng = random.Random(seed)

    def outcome(limit: float | None) -> list[list[int]]:
        choice = random.Random(seed)
        core = fake_core(page_size=4, pages=pages, rows=6, max_model_len=100)
        core.scheduler.limits = Limits(6, 64, limit)
        Machine(core, lambda load: true_cost(load) * rng.lognormvariate(0, 1))
        live = []
        for k in range(20):
            live.append(add(core, f"r{k}", choice.randint(1, 80), choice.randint(1, 15)))
            for _ in range(choice.randint(0, 4)):
                core.step()
        drain(core)
        assert all_pages_back(core)
        return [c.stream.output.token_ids for c in live]

    assert outcome(target) == outcome(None)


@pytest.mark.parametrize(
    "case",
    [
        "qwen_gqa4_prior_lora_inrange",
        pytest.param("olmo_mha_interleave4", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("target", [1e-6, 0.03])
def test_logits_are_the_same_whatever_the_budget_does(case, target):
    prompts = [[(7 * i * k + k) % 199 for i in range(90 + 60 * k)] for k in range(1, 5)]

    def served(limit: float | None) -> list[Continuation]:
        built = engine(case)
        core = built.core
        core.scheduler.limits = Limits(16, 256, limit)
        rng = random.Random(3)
        Machine(core, lambda load: true_cost(load) * rng.lognormvariate(0, 0.5))
        live = []
        for k, prompt in enumerate(prompts):
            live.append(core.add(f"r{k}", prompt, greedy(40 - 9 * k)))
            for _ in range(4):
                core.step()
        drain(core)
        return [trace(c, built.spec.vocab_size) for c in live]

    for got, want in zip(served(target), served(None), strict=True):
        assert got.tokens == want.tokens
        assert difference(got.logprobs, want.logprobs) < 2e-4


def test_timing_of_a_request():
    core, machine = timed_core(None, lambda load: 2.0 if load.tokens else 0.5)
    machine.now = 10.0
    alone = add(core, "a", 2000, 5)
    assert alone.moments.timing is None
    machine.now = 13.0
    drain(core)
    # 2000 tokens are three chunks of 1024 slots.
    timing = alone.moments.timing
    assert (timing.queue, timing.prefill, timing.decode) == (3.0, 6.0, 2.0)
    assert (alone.moments.first_token, alone.moments.ended) == (19.0, 21.0)


def test_timing_of_requests_that_were_taken_back_or_failed():
    core, machine = timed_core(None, lambda load: 1.0)
    core.scheduler.limits = Limits(1, 1024)
    running, waiting = add(core, "a", 3000, 5), add(core, "b", 10, 5)
    core.step()
    machine.now += 2.0
    core.abort("a")
    core.abort("b")
    assert running.moments.timing.queue == 0.0
    assert (running.moments.timing.prefill, running.moments.timing.decode) == (3.0, 0.0)
    assert (waiting.moments.timing.queue, waiting.moments.timing.prefill) == (3.0, 0.0)

    failing = add(core, "c", 10, 5)

    def fail(plan: StepPlan) -> Launched:
        machine.now += 4.0
        raise RuntimeError("the device is gone")

    machine.launch = fail
    with pytest.raises(RuntimeError):
        core.step()
    assert failing.moments.timing.prefill == 4.0


def test_a_retracted_request_keeps_its_first_start():
    core = fake_core(page_size=4, pages=16, rows=8, max_model_len=40)
    Machine(core, lambda load: 1.0)
    live = [core.add(f"r{k}", [k] * 3, SamplingParams(max_tokens=30)) for k in range(6)]
    drain(core)
    assert core.scheduler.preemptions > 0
    for c in live:
        timing = c.moments.timing
        assert c.moments.started == timing.queue
        assert timing.queue + timing.prefill + timing.decode == c.moments.ended
        assert timing.decode >= 29.0


@pytest.mark.parametrize("overlap", [False, True])
def test_stall_is_what_decoding_rows_waited_for_prefill(overlap):
    core, machine, long = streams_and_a_long_prompt(None, overlap=overlap)
    waited = sum(s - true_cost(Load(load.rows, load.rows_context)) for load, s in machine.steps)
    assert core.stats.decode_stall_seconds == pytest.approx(waited, rel=0.02)
    before = core.stats.decode_stall_seconds
    drain(core)
    assert core.stats.decode_stall_seconds == before
    assert long.finished


def test_no_stall_when_nobody_decodes():
    core, _ = timed_core(None)
    add(core, "a", 5000, 1)
    drain(core)
    assert core.stats.decode_stall_seconds == 0
    assert core.stats.prefill_seconds == pytest.approx(core.clock())
