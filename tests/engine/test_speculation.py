"""Speculative decoding through the whole engine: drafts change the speed, not the tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cairn.cache.invariants import check
from cairn.engine.drafts import NgramDrafter
from cairn.engine.planned_step import Limits
from cairn.engine.request import Request
from cairn.runner.graphs import Ending
from cairn.specs.speculation import most_drafts
from cairn.types import CompletionOutput, SamplingParams
from tests.engine.fakes import FakeDrafter, all_pages_back
from tests.engine.harness import ROUNDING, engine, occupy, poison, text
from tests.engine.test_families import FAMILIES, build, prompts_of
from tests.failures.models import folder
from tests.support import shows

PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = replace(PLAIN, temperature=1.0, seed=11)
ALIKE = ("recurrent with experts", "latent in 8 bits", "latent, shared selections", "compressed")
"""Families whose steps with drafts are like those of another one, or in test_draft_head.py."""
RIGHT = {"right": 1.0, "random": 0.6, "wrong": 0.0}


def assert_told_alike(found: CompletionOutput, wanted: CompletionOutput) -> None:
    """Tokens, end reasons and log-probabilities are equal."""
    for name in ("token_ids", "finish_reason", "stop_reason"):
        assert getattr(found, name) == getattr(wanted, name)
    for entry, other in zip(found.logprobs or (), wanted.logprobs or (), strict=True):
        assert dict(entry).keys() == dict(other).keys()
        for token in entry:
            assert entry[token].logprob == pytest.approx(other[token].logprob, abs=ROUNDING)


def ways_to_end(prompts: list[list[int]], outputs: list[list[int]]) -> list[SamplingParams]:
    """Greedy and sampled, ended by length, a stop id or the context, within a step."""
    found = []
    for number, output in enumerate(outputs):
        base = DRAWN if number % 2 else PLAIN
        base = replace(base, logprobs=2 if number == 2 else None)
        if number % 3 == 0:
            base = replace(base, max_tokens=11)
        elif number % 3 == 1:
            base = replace(base, stop_token_ids=[output[13]], min_tokens=number)
        else:
            base = replace(base, max_tokens=None)
        found.append(base)
    return found


def serve(built, prompts, params, rng=None) -> list[CompletionOutput]:
    """Requests that arrive while others run, some aborted at random; the ledger is checked after
    every step, and unowned memory is NaN."""
    core, size = built.core, built.config.page_size
    waiting, live, doomed = list(zip(prompts, params, strict=True)), [], {}
    hostage = None
    if rng is not None:
        hostage = occupy(core.cache, keep=2 * int(built.slots.pages_for(core.shape.max_model_len)))
    while waiting or core.has_work:
        if waiting and (rng is None or rng.random() < 0.3 or not core.has_work):
            live.append(core.add(f"r{core._arrivals}", *waiting.pop(0)))
            if rng is not None and rng.random() < 0.15:
                doomed[len(live) - 1] = rng.randint(1, 5)
        if rng is not None:
            core.scheduler.limits = Limits(4, rng.choice([3, size, size + 1, 2 * size, 1000]))
        core.step()
        for number in doomed:
            doomed[number] -= 1
            if doomed[number] == 0:
                core.abort(live[number].request.id)
        poison(built)
        running = [r.lease for r in core.scheduler.running if r.lease is not None]
        check(core.cache, [*running, *([hostage] if hostage else [])])
    if hostage is not None:
        core.cache.close(hostage)
    assert all_pages_back(core)
    return [continuation.stream.output for continuation in live]


@shows("hils qwen3_moe qwen3_next qwen3_5 deepseek_v32 glm_moe_dsa", "speculation")
@pytest.mark.parametrize(
    "family, kind",
    [
        *((family, "random") for family in FAMILIES if family not in ALIKE),
        *(pytest.param(f, "random", marks=pytest.mark.slow) for f in ALIKE),
        *(pytest.param(f, k, marks=pytest.mark.slow) for f in FAMILIES for k in ("right", "wrong")),
    ],
)
def test_any_schedule_with_guesses_gives_what_plain_decoding_gives(family: str, kind: str) -> None:
    """Cold and warm, greedy and sampled, with aborts and preemptions, for all ends of an output."""
    rng = random.Random(f"{family} {kind}")
    plain = build(family, enable_prefix_caching=False)
    prompts = prompts_of(rng, min(plain.config.page_size, 32), plain.spec.vocab_size)
    longest = max(len(prompt) for prompt in prompts) + 20
    plain = build(family, enable_prefix_caching=False, max_model_len=longest)
    first = serve(plain, prompts, [DRAWN if n % 2 else PLAIN for n in range(len(prompts))])
    params = ways_to_end(prompts, [output.token_ids for output in first])
    wanted = serve(plain, prompts, params)
    built = build(family, max_model_len=longest)
    drafter = built.core.scheduler.drafter = FakeDrafter(3, RIGHT[kind], most=7)
    for prompt, output in zip(prompts, wanted, strict=True):
        drafter.knows(prompt, output.token_ids)
    for overlap in (False, True):
        built.core.overlap = overlap
        for found, output in zip(serve(built, prompts, params, rng), wanted, strict=True):
            if found.finish_reason == "abort":
                assert found.token_ids == output.token_ids[: len(found.token_ids)]
            else:
                assert_told_alike(found, output)
    totals = built.core.scheduler.drafts
    assert totals.drafted > 20
    # The tokens after the end of an output are unknown, and steps that ran ahead of wrong guesses
    # were in vain.
    low, high = {"right": (0.8, 1), "random": (0.1, 0.8), "wrong": (0, 0)}[kind]
    assert low <= totals.accepted / totals.drafted <= high
    assert built.core.cache.prefix_hits or built.config.page_size == 64


@pytest.mark.parametrize(("window", "most"), [(4, 2), (8, 5)])
def test_pages_of_four_slots_end_in_every_step_up_to_the_most_guesses(
    tmp_path, window: int, most: int
) -> None:
    """The maximum number of guesses, k + ceil(k / 3) < W; rejected ones were followed by a
    landmark."""
    model = folder(tmp_path, chunk_size=4, hils_sliding_window=window, hils_topk=2)
    plain = engine(str(model), load_format="random")
    assert most_drafts(plain.spec) == most
    prompts = [text(n, length, plain.spec.vocab_size) for n, length in enumerate((1, 9, 23))]
    params = [replace(DRAWN if n % 2 else PLAIN, max_tokens=20) for n in range(3)]
    wanted = serve(plain, prompts, params)
    built = engine(str(model), load_format="random")
    for drafts in (1, most):
        for right in RIGHT.values():
            drafter = built.core.scheduler.drafter = FakeDrafter(drafts, right, most=drafts)
            for prompt, output in zip(prompts, wanted, strict=True):
                drafter.knows(prompt, output.token_ids)
            for found, output in zip(serve(built, prompts, params), wanted, strict=True):
                assert_told_alike(found, output)
    assert 40 < built.core.scheduler.drafts.accepted < built.core.scheduler.drafts.drafted - 40


@pytest.mark.parametrize("family", [name for name in FAMILIES if "recurrent" in name])
def test_a_wrong_guess_leaves_nothing_in_a_state(family: str) -> None:
    plain, guessing = build(family), build(family)
    prompt = text(4, 70, plain.spec.vocab_size)
    (wanted,) = serve(plain, [prompt], [replace(PLAIN, max_tokens=40)])
    drafter = guessing.core.scheduler.drafter = FakeDrafter(1, 0.0)
    drafter.knows(prompt, wanted.token_ids)
    (found,) = serve(guessing, [prompt], [replace(PLAIN, max_tokens=40)])
    assert found.token_ids == wanted.token_ids
    assert guessing.core.scheduler.drafts.drafted > 20
    row = guessing.core.scheduler._free_rows[-1]
    states = (built.runner.pools.states() for built in (guessing, plain))
    for own, other in zip(*states, strict=True):
        assert (own[row] - other[row]).abs().max() <= 1e-5 * other[row].abs().max()


def test_a_state_is_kept_exactly_at_the_border_that_guesses_pass() -> None:
    """The next turn of a conversation resumes after 256 tokens, as without drafts."""
    built, cold = build("recurrent"), build("recurrent", enable_prefix_caching=False)
    prompt = text(5, 200, built.spec.vocab_size)
    (first,) = serve(cold, [prompt], [replace(PLAIN, max_tokens=80)])
    drafter = built.core.scheduler.drafter = FakeDrafter(2, 1.0, most=7)
    drafter.knows(prompt, first.token_ids)
    serve(built, [prompt], [replace(PLAIN, max_tokens=80)])
    following = prompt + first.token_ids + text(6, 20, built.spec.vocab_size)
    before = built.core.scheduler.cached_prompt_tokens
    (found,) = serve(built, [following], [replace(PLAIN, logprobs=2)])
    assert built.core.scheduler.cached_prompt_tokens == before + 256
    assert_told_alike(found, serve(cold, [following], [replace(PLAIN, logprobs=2)])[0])


@shows("hils qwen3_moe deepseek_v32 glm_moe_dsa", "speculation")
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["right", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_guesses_on_a_gpu_give_what_plain_decoding_gives(family: str, kind: str) -> None:
    """With graphs and overlap, for all kinds of requests."""
    rng = random.Random(5)
    plain = build(family, device="cuda")
    prompts = prompts_of(rng, 16, plain.spec.vocab_size)
    built = build(
        family, device="cuda", speculative_algorithm="NGRAM", speculative_num_draft_tokens=7
    )
    assert built.core.overlap
    built.core.scheduler.pace = None
    for asked in ({}, {"logprobs": 2}, {"repetition_penalty": 1.1, "logprobs": 1}):
        params = [
            replace(DRAWN if n % 2 else PLAIN, max_tokens=40, **asked) for n in range(len(prompts))
        ]
        wanted = serve(plain, prompts, params)
        drafter = built.core.scheduler.drafter = FakeDrafter(3, RIGHT[kind], most=7)
        for prompt, output in zip(prompts, wanted, strict=True):
            drafter.knows(prompt, output.token_ids)
        before = built.core.scheduler.drafts.accepted
        for found, output in zip(serve(built, prompts, params), wanted, strict=True):
            assert_told_alike(found, output)
        assert built.core.scheduler.drafts.accepted > before + 20
    endings = {kind.ending for kind in built.runner.graphs._captured if kind.guessing}
    # With states the graph samples the tokens itself, to know which ones are accepted.
    assert endings > {Ending.REPORT} | (set() if "recurrent" in family else {Ending.LOGITS})


def naive(tokens: list[int], most: int, shortest: int, longest: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                period = tokens[end:]
                return [period[i % len(period)] for i in range(most)]
    return []


def test_ngram_guesses_are_those_of_a_search_one_by_one() -> None:
    rng = random.Random(2)
    found = 0
    for _ in range(400):
        tokens = [rng.randrange(rng.choice([2, 4])) for _ in range(rng.randrange(1, 30))]
        shortest = rng.randint(1, 3)
        longest = shortest + rng.randrange(4)
        most = rng.randint(1, 6)
        wanted = naive(tokens, most, shortest, longest)
        assert NgramDrafter(4, shortest, longest).find(tokens, most) == wanted
        found += bool(wanted)
    assert found > 200


class Wrong:
    """Right guesses, except for one position.

    Args:
        text: prompt and output.
        place: of the wrong one; that of the first is 0.
        drafts: at a time.
    """

    ahead = 0

    def __init__(self, text: list[int], place: int, drafts: int) -> None:
        self.text, self.place, self.drafts = text, place, drafts

    def guess(self, request: Request, most: int) -> list[int]:
        begin = len(request.tokens)
        truth = self.text[begin : begin + most]
        return [token ^ (i == self.place) for i, token in enumerate(truth)]


@pytest.mark.parametrize("drafts", [4, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["landmarks and windows", "recurrent"])
def test_a_guess_may_be_wrong_in_any_place_behind_any_prompt(family: str, drafts: int) -> None:
    """Also if the prompt is as long as a step of guesses."""
    params, plain, guessing = replace(PLAIN, max_tokens=12), build(family), build(family)
    for length in (1, drafts + 1, 16):
        prompt = text(length, length, plain.spec.vocab_size)
        (wanted,) = serve(plain, [prompt], [params])
        for place in range(drafts + 1):
            whole = prompt + wanted.token_ids
            guessing.core.scheduler.drafter = Wrong(whole, place, drafts)
            before = replace(guessing.core.scheduler.drafts)
            (found,) = serve(guessing, [prompt], [params])
            assert found.token_ids == wanted.token_ids
            after = guessing.core.scheduler.drafts
            runs = after.runs - before.runs
            if runs * (drafts + 1) < params.max_tokens:
                assert after.accepted - before.accepted == runs * min(place, drafts)
