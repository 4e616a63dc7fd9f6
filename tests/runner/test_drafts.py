"""Accepted guesses of a step, compared with a check token by token."""

from __future__ import annotations

import random

import torch

from cairn.runner.drafts import Drafts
from cairn.runner.step import DecodeWork, RowWork, StepPlan


def plan_of(works: list[RowWork], decoding: int = 0) -> StepPlan:
    decode = DecodeWork.of(range(100, 100 + decoding), [5] * decoding, [1] * decoding)
    return StepPlan(0, (), (), (), tuple(works), decode)


def drafts_of(works: list[RowWork], decoding: int = 0) -> Drafts:
    found = Drafts.of(plan_of(works, decoding))
    assert found is not None
    return found


def test_a_step_without_guesses_has_none():
    works = [RowWork(0, 0, [1, 2], sample=True), RowWork(1, 0, [1], sample=False)]
    assert Drafts.of(plan_of(works, 3)) is None
    assert Drafts.of(plan_of([], 3)) is None


def accepted(guesses: list[int], chosen: list[int]) -> list[int]:
    """The accepted tokens of one row."""
    kept = []
    for i, token in enumerate(chosen):
        kept.append(token)
        if i == len(guesses) or token != guesses[i]:
            break
    return kept


def test_random_rows_against_a_comparison_one_by_one():
    """Decoding rows, prefills with and without a sampled token, and rows with any number of
    guesses. The vocabulary is small, so that guesses are often right."""
    rng = random.Random(4)
    seen = set()
    for _ in range(300):
        decoding = rng.randrange(4)
        works, guesses = [], [[] for _ in range(decoding)]
        for row in range(rng.randint(1, 6)):
            guess = [rng.randrange(2) for _ in range(rng.choice([0, 1, 3, 6]))]
            given = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
            sample = bool(guess) or rng.random() < 0.7
            works.append(RowWork(row, 7, given + guess, sample, 3, drafts=len(guess)))
            if sample:
                guesses.append(guess)
        drafts = Drafts.of(plan_of(works, decoding))
        if drafts is None:
            assert not any(guesses)
            continue
        # A row may have no valid token.
        chosen = [[rng.choice([0, 1, 0, 1, -1]) for _ in range(len(g) + 1)] for g in guesses]
        wanted = [accepted(g, c) for g, c in zip(guesses, chosen, strict=True)]
        flat = [token for row in chosen for token in row]
        last, counts = drafts.accept(torch.tensor(flat))
        counted = drafts.counted(last)
        assert [t for t, c in zip(flat, counted.tolist(), strict=True) if c] == [
            token for row in wanted for token in row
        ]
        assert counts.tolist() == [len(row) for row in wanted] == drafts.counts(flat)
        assert [flat[i] for i in last.tolist()] == [row[-1] for row in wanted]
        kept = drafts.kept(flat, counts.tolist())
        assert kept == [token for row in wanted for token in row]
        known = {i: f"choice {i}" for i in range(len(flat)) if rng.random() < 0.6}
        places = drafts.kept(range(len(flat)), counts.tolist())
        told = drafts.renumbered(known, counts.tolist())
        assert told == {i: known[at] for i, at in enumerate(places) if at in known}
        seen.update(len(row) for row in wanted)
    assert seen >= {1, 2, 3, 4, 5}


def test_guesses_of_one_row_do_not_reach_into_the_next():
    """All right, all wrong, and a right one after a wrong one, which is not accepted."""
    works = [
        RowWork(0, 0, [9, 4, 5], sample=True, drafts=2),
        RowWork(1, 0, [9, 4, 5], sample=True, drafts=2),
        RowWork(2, 0, [4, 5], sample=True, drafts=1),
    ]
    last, counts = drafts_of(works).accept(torch.tensor([4, 5, 6, 0, 5, 6, 5, 7]))
    assert (last.tolist(), counts.tolist()) == ([2, 3, 7], [3, 1, 2])


def test_a_work_may_hold_nothing_but_guesses():
    drafts = drafts_of([RowWork(0, 4, [7, 8], sample=True, drafts=1)], decoding=1)
    assert drafts.guess.tolist() == [-2, 8, -2]
    assert drafts.run.tolist() == [0, 1, 1] and drafts.begin.tolist() == [0, 1]


def test_guesses_before_choices():
    works = [RowWork(0, 0, [9, 4, 5], True, drafts=2), RowWork(1, 0, [9], True)]
    at, guess = drafts_of(works, decoding=1).before([0, 1, 3, 4])
    assert list(zip(at.tolist(), guess.tolist(), strict=True)) == [(2, 4), (2, 5)]
