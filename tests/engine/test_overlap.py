"""Steps launched before the previous result is known give the same outputs.

With a fake model, whose results are kept back until they are asked for, and with real ones.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import LLM, SamplingParams
from cairn.cache.invariants import check
from cairn.config import default_model_path
from cairn.engine.build import Built
from cairn.engine.continuation import Continuation
from cairn.engine.core import EngineCore
from cairn.engine.planned_step import Limits
from cairn.runner.step import StepPlan, StepResult
from cairn.types import Grammar
from tests.engine.fakes import VOCAB, all_pages_back, drain, fake_core, next_token
from tests.engine.harness import difference, engine, poison, trace
from tests.support import shows


class Late:
    """Wraps an executor: results are returned in order when requested, and work does not refer to
    tokens without a result."""

    def __init__(self, core: EngineCore) -> None:
        self.inner, core.executor = core.executor, self
        self.prompts: dict[str, list[int]] = {}
        self.names: dict[int, str] = {}
        self.told: dict[str, int] = {}
        self.pending: deque[LateStep] = deque()
        self.launched = 0
        self.most = 0
        self.fail: Callable[[int], bool] = lambda number: False

    def launch(self, plan: StepPlan) -> LateStep:
        ready = self.inner.launch(plan)
        for opened in plan.opened:
            self.names[opened.row] = opened.request_id
        for work in plan.work:
            if work.tokens is not None:
                name, end = self.names[work.row], work.first + work.num_tokens
                prompt = self.prompts[name]
                told = self.told.get(name, 0)
                known = prompt + [next_token(name, i) for i in range(told)]
                assert end <= len(known), "a token is named that nobody knows yet"
                assert list(work.tokens) == known[work.first : end]
        step = LateStep(self, self.launched, plan, ready.value)
        self.launched += 1
        self.pending.append(step)
        self.most = max(self.most, len(self.pending))
        assert len(self.pending) <= 2
        return step


class LateStep:
    def __init__(self, owner: Late, number: int, plan: StepPlan, value: StepResult) -> None:
        self.owner, self.number, self.value = owner, number, value
        self.sampled = [(owner.names[w.row], w.output_index) for w in plan.row_by_row() if w.sample]

    def result(self) -> StepResult:
        assert self.owner.pending.popleft() is self
        if self.owner.fail(self.number):
            raise RuntimeError("the device is gone")
        for name, index in self.sampled:
            self.owner.told[name] = max(index + 1, self.owner.told.get(name, 0))
        return self.value


def check_ledger(core: EngineCore) -> None:
    check(core.cache, [r.lease for r in core.scheduler.running if r.lease is not None])


def add(
    core: EngineCore, late: Late | None, name: str, prompt: list[int], count: int, priority: int = 0
) -> Continuation:
    if late is not None:
        late.prompts[name] = prompt
    return core.add(name, prompt, SamplingParams(max_tokens=count), priority=priority)


def alone(core: EngineCore, one: Continuation) -> tuple[list[int], object]:
    """The output of a request that runs alone."""
    single = fake_core(eos_ids=core.shape.eos_ids, max_model_len=core.shape.max_model_len)
    prompt = list(one.request.tokens[: one.request.num_prompt])
    single.scheduler.limits = Limits(1, 1 << 20)
    got = add(single, None, one.request.id, prompt, one.request.max_output)
    drain(single)
    return got.stream.output.token_ids, got.stream.output.finish_reason


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([2, 4, 16]),
    landmarks=st.booleans(),
    pages=st.sampled_from([12, 20, 60]),
    rows=st.sampled_from([1, 2, 5, 16]),
    step_slots=st.sampled_from([1, 7, 64, 1000]),
    prefix_caching=st.booleans(),
    eos_ids=st.sampled_from([(), (3,), (0, 3, 7)]),
    window=st.sampled_from([None, 0, 1, 3]),
)
def test_random_schedules(
    seed, page_size, landmarks, pages, rows, step_slots, prefix_caching, eos_ids, window
):
    """Arrivals, ends and aborts at any time, with few pages: each request gets its own tokens,
    once."""
    rng = random.Random(seed)
    core = fake_core(
        page_size=page_size,
        landmarks=landmarks,
        pages=pages,
        rows=rows,
        step_slots=step_slots,
        prefix_caching=prefix_caching,
        eos_ids=eos_ids,
        max_model_len=min(60, pages * (page_size - landmarks) - 1),
        overlap=True,
        # Enough for one sequence's largest step.
        window_pages=0 if window is None else window + min(step_slots, 60) // page_size * 2 + 2,
        reach=window or 0,
    )
    late = Late(core)
    longest = core.shape.max_model_len
    every: list[Continuation] = []
    ended: list[str] = []
    made = 0
    while made < 25 or core.has_work:
        for _ in range(rng.randint(0, 3) if made < 25 else 0):
            length = rng.randint(1, min(longest - 1, 4 * page_size))
            shared = rng.randint(0, length)
            prompt = [i % 3 for i in range(shared)]
            prompt += [rng.randrange(VOCAB) for _ in range(length - shared)]
            count = rng.randint(1, 3 * page_size)
            every.append(add(core, late, f"r{made}", prompt, count, rng.randint(0, 1)))
            made += 1
        live = [one for one in every if not one.finished]
        if live and rng.random() < 0.15:
            one = rng.choice(live)
            core.abort(one.request.id)
            ended.append(one.request.id)
        ended += [one.request.id for one in core.step() if one.finished]
        check_ledger(core)
    assert sorted(ended) == sorted(one.request.id for one in every)
    for one in every:
        tokens, reason = alone(core, one)
        output = one.stream.output
        if output.finish_reason == "abort":
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert (output.token_ids, output.finish_reason) == (tokens, reason)
    assert all_pages_back(core)
    assert not core.scheduler.running and not late.pending


def test_a_step_is_launched_before_the_result_of_the_last_one():
    core = fake_core(overlap=True)
    late = Late(core)
    one = add(core, late, "a", [1] * 5, 10)
    assert core.step() == []
    for count in range(1, 11):
        assert core.step() == [one]
        assert len(one.stream.output.token_ids) == count
    assert late.most == 2
    assert not core.has_work
    # The last token is known to be the last, so no step runs after it.
    assert late.launched == 10


def test_nothing_is_kept_of_the_token_after_the_end():
    """The end of sequence is detected when the next step already runs."""
    chosen = [next_token("a", i) for i in range(99)]
    ends = next(i for i in range(3, 99) if chosen[i] not in chosen[:i])
    core = fake_core(page_size=4, eos_ids=(chosen[ends],), overlap=True)
    late = Late(core)
    one = add(core, late, "a", [1] * 5, 200)
    drain(core)
    assert late.launched == ends + 2
    assert one.stream.output.finish_reason == "stop"
    assert one.stream.output.token_ids == alone(core, one)[0]
    assert all_pages_back(core)
    check_ledger(core)
    # Its cached tokens are its own, without the one after the end.
    slots, tokens = core.cache.slots, [1] * 5 + chosen[: ends + 2]
    lease = core.cache.open(tokens, slots.complete_pages(len(tokens)))
    assert lease.cached_pages <= slots.complete_pages(5 + ends + 1)


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_an_abort_waits_for_the_steps_in_flight(moment):
    """Pages that a running step writes are not reused until it has ended."""
    core = fake_core(page_size=4, pages=32, overlap=True)
    late = Late(core)
    gone, stays = add(core, late, "gone", [1] * 30, 40), add(core, late, "stays", [2] * 5, 20)
    for _ in range({"before": 0, "between": 1, "after": 5}[moment]):
        core.step()
    owned = core.cache.num_owned
    core.abort("gone")
    if late.pending:
        assert core.cache.num_owned == owned
    check_ledger(core)
    core.step()
    core.step()
    assert [r.id for r in core.scheduler.running] == ["stays"]
    drain(core)
    assert gone.stream.output.finish_reason == "abort"
    assert stays.stream.output.token_ids == alone(core, stays)[0]
    assert all_pages_back(core)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(number):
    """Detected while the next step runs, with the same rows and a new one."""
    core = fake_core(page_size=4, pages=64, overlap=True)
    late = Late(core)
    late.fail = lambda launched: launched == number
    failed = [add(core, late, f"f{i}", [i] * 6, 20) for i in range(3)]
    with pytest.raises(RuntimeError, match="device is gone"):
        for _ in range(number + 1):
            core.step()
        after = add(core, late, "early", [5] * 9, 5)
        core.step()
    assert {one.stream.output.finish_reason for one in failed} == {"error"}
    after = add(core, late, "later", [6] * 9, 5)
    drain(core)
    assert after.stream.output.token_ids == alone(core, after)[0]
    assert all_pages_back(core)
    check_ledger(core)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 6])
def test_nothing_is_shared_of_what_follows_a_failed_step(number):
    """The step after the failed one, already running, completes pages that the failed one should
    have filled, or runs an unknown token."""
    core = fake_core(page_size=4, pages=64, step_slots=8, overlap=True)
    late = Late(core)
    late.fail = lambda launched: launched == number
    add(core, late, "a", [1, 2] * 10, 20)
    with pytest.raises(RuntimeError, match="device is gone"):
        drain(core)
    assert late.pending
    computed = core.cache.num_cached
    drain(core)
    assert core.cache.num_cached == computed
    check_ledger(core)


def test_a_row_whose_logits_are_nan_leaves_the_others(device):
    """The step after it runs the token that the row does not have."""
    answers = []
    for broken in (None, 3):
        built = engine("qwen_gqa4_prior_lora_inrange", device=device, disable_cuda_graph=True)
        core, model = built.core, built.runner.model
        core.overlap = True
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        bad = core.add("bad", list(range(5, 25)), params)
        good = core.add("good", list(range(9, 40)), params)
        plain, steps = model.logits, itertools.count()

        def logits(hidden, plain=plain, steps=steps, broken=broken):
            found = plain(hidden)
            if next(steps) == broken:
                found[0] = float("nan")
            return found

        model.logits = logits
        drain(core)
        assert bad.stream.output.finish_reason == ("error" if broken else "length")
        assert len(bad.stream.output.token_ids) == (broken or 9)
        answers.append(good.stream.output.token_ids)
        assert all_pages_back(core)
    assert answers[0] == answers[1]


def test_without_free_pages_the_next_step_is_not_overlapped():
    """Running rows keep their pages: they are not preempted during a step."""
    core = fake_core(page_size=4, pages=16, rows=8, max_model_len=40, overlap=True)
    late = Late(core)
    live = [add(core, late, f"r{k}", [k, k, k], 30) for k in range(6)]
    while core.has_work:
        core.step()
        check_ledger(core)
    assert core.scheduler.preemptions > 0
    assert late.most == 2
    for one in live:
        assert one.stream.output.token_ids == alone(core, one)[0]
    assert all_pages_back(core)


@pytest.mark.parametrize("page_size, landmarks, window", [(4, True, None), (16, False, 2)])
@pytest.mark.parametrize("step_slots", [7, 64])
def test_only_the_last_in_order_is_taken_back_and_never_beside_a_step_in_flight(
    page_size, landmarks, window, step_slots
):
    """A step that is planned ahead finds pages for all its rows: running rows cannot give theirs,
    and earlier rows would lose them."""
    preemptions = 0
    for seed in range(12):
        rng = random.Random(seed)
        core = fake_core(
            page_size=page_size,
            landmarks=landmarks,
            pages=128 // page_size,
            rows=8,
            step_slots=step_slots,
            max_model_len=60,
            overlap=True,
            window_pages=0 if window is None else window + 60 // page_size * 2 + 2,
            reach=window or 0,
        )
        late, planned_ahead = Late(core), []
        schedule = core.scheduler.schedule

        def watched(
            schedule=schedule, scheduler=core.scheduler, late=late, planned_ahead=planned_ahead
        ):
            in_flight, before = len(late.pending), scheduler.preemptions
            plan = schedule()
            if in_flight:
                planned_ahead.append(scheduler.preemptions - before)
            return plan

        core.scheduler.schedule = watched
        for k in range(20):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            count = rng.randint(1, 50)
            add(core, late, f"r{k}", prompt, count, rng.randint(0, 2))
        while core.has_work:
            before = {r: r.retractions for r in core.scheduler.running}
            core.step()
            retracted = [r for r, count in before.items() if r.retractions > count]
            kept = [r for r in core.scheduler.running if r in before and r not in retracted]
            assert all(r.order > other.order for r in retracted for other in kept)
        assert planned_ahead and not any(planned_ahead)
        preemptions += core.scheduler.preemptions
    assert preemptions > 20


def drawn_params(rng: random.Random) -> SamplingParams:
    """All ways of sampling; each depends on the previous tokens in its own way."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": rng.randrange(1 << 30)},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0, "logprobs": -1, "prompt_logprobs": -1},
        {"temperature": 1.0, "seed": 7, "logprobs": 3, "min_tokens": 4},
        {"temperature": 0, "stop_token_ids": [rng.randrange(200) for _ in range(20)]},
    ]
    count, to_the_end = rng.choice([1, 16, 80, 90]), rng.random() < 0.7
    return SamplingParams(max_tokens=count, ignore_eos=to_the_end, **rng.choice(kinds))


def play(built: Built, overlap: bool, seed: int) -> dict[str, Continuation]:
    """The same arrivals and aborts, by step; prompts share prefixes, and there are few pages."""
    core, rng = built.core, random.Random(seed)
    core.overlap = overlap
    core.scheduler.limits = Limits(core.scheduler.limits.max_rows, 70)
    size = built.config.page_size
    beginning = [rng.randrange(200) for _ in range(3 * size)]
    found: dict[str, Continuation] = {}
    ticks = 0
    while len(found) < 12 or core.has_work:
        if len(found) < 12 and ticks % 2 == 0:
            prompt = beginning[: rng.choice([0, size, 3 * size])]
            prompt = prompt + [rng.randrange(200) for _ in range(rng.randint(1, 3 * size))]
            params = drawn_params(rng)
            for index in range(rng.choice([1, 1, 3])):
                name = f"{seed}.{len(found)}"
                found[name] = core.add(name, prompt, params, index=index)
        if ticks % 13 == 12:
            core.abort(f"{seed}.{rng.randrange(12)}")
        core.step()
        check_ledger(core)
        poison(built)
        ticks += 1
    assert all_pages_back(core)
    return found


def assert_same_answer(got: Continuation, wanted: Continuation, vocab: int) -> None:
    a, b = trace(got, vocab), trace(wanted, vocab)
    aborted = "abort" in (got.stream.output.finish_reason, wanted.stream.output.finish_reason)
    if aborted:
        count = min(len(a.tokens), len(b.tokens))
        assert a.tokens[:count] == b.tokens[:count]
        return
    assert a.tokens == b.tokens
    assert got.stream.output.finish_reason == wanted.stream.output.finish_reason
    if got.request.params.logprobs == -1:
        assert difference(a.logprobs, b.logprobs) < 2e-4
        assert difference(a.prompt_logprobs, b.prompt_logprobs) < 2e-4


@shows("hils", "overlap")
@pytest.mark.parametrize(
    "case",
    [
        "qwen_gqa4_prior_lora_inrange",
        pytest.param("qwen_noprior_lmk_k", marks=pytest.mark.slow),
    ],
)
def test_the_same_answers_as_step_after_step(case, device):
    room = 14 * engine(case).memory.bytes_per_page
    found, retractions = [], 0
    for overlap in (True, False):
        built = engine(case, device=device, max_num_seqs=6, kv_cache_memory=room)
        found.append(play(built, overlap, seed=1))
        retractions += built.core.scheduler.preemptions
    assert retractions > 0
    assert found[0].keys() == found[1].keys()
    for name, got in found[0].items():
        assert_same_answer(got, found[1][name], built.spec.vocab_size)


def test_text_grammars_and_continuations(device):
    """Stop strings end within a running step; a grammar needs each token before the next; outputs
    share a prompt."""
    greedy = {"temperature": 0, "max_tokens": 60}
    params = [
        SamplingParams(**greedy),
        SamplingParams(**greedy, stop=["qu", "rt str"]),
        SamplingParams(**greedy, grammar=Grammar("regex", "[a-f]{3,9}(x|yz)[0-9]{2}")),
        SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=40, stop=["\n"]),
        SamplingParams(**greedy, grammar=Grammar("regex", "(yes|no), [A-Z]{4}"), logprobs=2),
    ]
    texts = ["def main(", "import os\n" * 20, "the answer: ", "x = [1, 2", "class A:\n    pass"]
    llm = LLM(
        default_model_path(),
        dtype="float32",
        device=device,
        kv_cache_memory="16MiB",
        max_num_seqs=4,
    )
    found = []
    for overlap in (True, False):
        llm.engine.core.overlap = overlap
        results = llm.generate(texts, params, use_tqdm=False)
        found.append([[(o.text, o.finish_reason) for o in one.outputs] for one in results])
        assert all_pages_back(llm.engine.core)
    assert found[0] == found[1]
    assert found[0][1][0][1] == "stop"
    llm.shutdown()
