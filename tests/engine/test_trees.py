"""Alternative drafts: whichever one is right is accepted, and its tokens are in the right slots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cairn.engine.drafts import HeadDrafter, NgramDrafter
from cairn.engine.request import Request
from cairn.runner.step import StepPlan
from tests.engine.fakes import FakeDrafter
from tests.engine.harness import text
from tests.engine.test_draft_head import LATENT, STEPS, Mixed, Seen, drafting
from tests.engine.test_draft_head import plain as without
from tests.engine.test_draft_head import serve as serve_drafting
from tests.engine.test_families import build, prompts_of
from tests.engine.test_speculation import DRAWN, PLAIN, assert_told_alike, serve
from tests.support import shows

WIDTH = 3


class Fork:
    """Right and wrong alternatives to drafts that are wrong.

    Args:
        drafter: knows the right ones.
        rng: which are.
    """

    def __init__(self, drafter: FakeDrafter, rng: random.Random) -> None:
        self.drafter, self.rng = drafter, rng
        self.asked = self.right = 0

    def others(self, request: Request, guesses: Sequence[int], count: int) -> list[list[int]]:
        known = [out for prompt, out in self.drafter.texts if prompt == self.prompt(request)]
        truth = known[0][request.num_output :][: len(guesses)] if known else []
        found, begun = [], {guesses[0]}
        for i in range(count):
            token = 3 + (guesses[0] + i) % 50
            guess = truth if self.rng.random() < 0.6 else [token] * len(guesses)
            if guess and guess[0] not in begun:
                begun.add(guess[0])
                found.append(guess)
                self.right += guess is truth
        self.asked += 1
        return found

    @staticmethod
    def prompt(request: Request) -> list[int]:
        return request.tokens[: request.num_prompt].tolist()


@shows("hils qwen3_moe", "speculation")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["landmarks", "experts"])
def test_a_right_branch_beside_wrong_guesses(family: str, device: str) -> None:
    """Any schedule, cold and warm, greedy and sampled, with aborts and preemptions; a tree never
    crosses the end of a page."""
    rng = random.Random(family)
    plain = build(family, device=device, enable_prefix_caching=False)
    prompts = prompts_of(rng, min(plain.config.page_size, 24), plain.spec.vocab_size)[:3]
    longest = max(map(len, prompts)) + 20
    params = [replace(DRAWN if n % 2 else PLAIN, max_tokens=16) for n in range(len(prompts))]
    params[0] = replace(params[0], stop_token_ids=[5, 9])
    wanted = serve(plain, prompts, params)
    asked = {"speculative_num_draft_tokens": 4, "speculative_eagle_topk": WIDTH, "device": device}
    built = build(family, max_model_len=longest, speculative_algorithm="NGRAM", **asked)
    scheduler, size = built.core.scheduler, built.config.page_size
    drafter = scheduler.drafter = FakeDrafter(3, 0.2, most=4)
    for prompt, output in zip(prompts, wanted, strict=True):
        drafter.knows(prompt, output.token_ids)
    fork = Fork(drafter, rng)
    assert scheduler.trees is not None
    scheduler.pace, scheduler.trees = None, replace(scheduler.trees, brancher=fork)
    seen = Watched(built)
    for overlap in (False, True):
        built.core.overlap = overlap
        for found, output in zip(serve(built, prompts, params, rng), wanted, strict=True):
            if found.finish_reason == "abort":
                assert found.token_ids == output.token_ids[: len(found.token_ids)]
            else:
                assert_told_alike(found, output)
    assert seen.branches > 10 and seen.deepest <= size - 2
    # The first drafts alone are right in one of five cases.
    assert scheduler.drafts.accepted > seen.branches // 2


class Watched:
    """Counts the alternatives that a runner gets, and their extent in pages."""

    def __init__(self, built) -> None:
        self.branches = self.deepest = 0
        self.slots, self.launch = built.slots, built.runner.launch
        built.runner.launch = self

    def __call__(self, plan: StepPlan):
        for work in plan.work:
            place = self.slots.slot_of(work.first) % self.slots.page_size
            for branch in work.branches:
                self.branches += 1
                self.deepest = max(self.deepest, place + len(branch))
        return self.launch(plan)


class Second(Fork):
    """The draft layer's alternative first guesses, without other information."""

    def others(self, request: Request, guesses: Sequence[int], count: int) -> list[list[int]]:
        assert len(set(request.others)) == WIDTH and request.others[0] == request.guesses[0]
        found = super().others(request, guesses, count)
        return found if self.right % 2 else HeadDrafter(STEPS).others(request, guesses, count)


@shows("glm_moe_dsa", "speculation")
def test_branches_of_a_draft_layer() -> None:
    """Its guesses after a text are equal with and without alternatives in between."""
    family, seen = LATENT[0], Seen()
    prompts = [text(n, length, 120) for n, length in enumerate((5, 66))]
    params = [replace(DRAWN if n else PLAIN, max_tokens=14) for n in range(2)]
    wanted = serve_drafting(without(family), prompts, params)
    for options in ({}, {"speculative_eagle_topk": WIDTH}):
        built = drafting(family, **options)
        scheduler = built.core.scheduler
        drafter = Mixed(seen, 0.2)
        for prompt, output in zip(prompts, wanted, strict=True):
            drafter.knows(prompt, output.token_ids)
        if scheduler.trees is not None:
            fork = Second(drafter, random.Random(1))
            scheduler.trees = replace(scheduler.trees, brancher=fork)
        watched, before = Watched(built), seen.count
        scheduler.drafter, scheduler.pace = drafter, None
        found = serve_drafting(built, prompts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert watched.branches > 8 and fork.right > 4 and seen.count > before + 2


def test_other_continuations_are_newest_first_and_begin_differently() -> None:
    rng = random.Random(3)
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 25))]
        found = NgramDrafter(3, 1, 3).find_all(tokens, 3, 3)
        wanted: dict[int, list[int]] = {}
        for length in (3, 2, 1):
            for end in range(len(tokens) - 1, length - 1, -1):
                if length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                    period = tokens[end:]
                    guess = [period[i % len(period)] for i in range(3)]
                    wanted.setdefault(guess[0], guess)
        assert found == list(wanted.values())
