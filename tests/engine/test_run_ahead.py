"""Steps planned before the preceding guesses are verified; the executor checks each plan."""

from __future__ import annotations

import random

import pytest

from cairn.cache.invariants import check
from cairn.engine import run_ahead
from cairn.engine.drafts import NgramDrafter
from cairn.engine.pace import Pace, learn
from cairn.engine.request import Request
from cairn.engine.run_ahead import LIKELY, tokens_ahead
from cairn.runner.step import RowWork
from cairn.types import SamplingParams
from tests.engine.fakes import VOCAB, all_pages_back, fake_core

DRAFTS = 3


class Copying:
    """Outputs that repeat a passage, except for a few tokens.

    Args:
        rng: draws it.
        breaks: share of tokens that are others.
    """

    def __init__(self, rng: random.Random, breaks: float) -> None:
        self.passage = [rng.randrange(VOCAB) for _ in range(30)]
        self.other = {i for i in range(400) if rng.random() < breaks}

    def token(self, request_id: str, index: int) -> int:
        token = self.passage[index % len(self.passage)]
        return (token + 1 + len(request_id)) % VOCAB if index in self.other else token


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_every_request_its_tokens(seed: int) -> None:
    """Several requests, some aborted or stopped while a step runs ahead; with few pages, so that
    some are preempted."""
    rng = random.Random(seed)
    text = Copying(rng, rng.choice([0.0, 0.05, 0.3]))
    core = fake_core(
        page_size=rng.choice([4, 8]),
        pages=rng.choice([40, 200]),
        landmarks=rng.random() < 0.5,
        window_pages=rng.choice([0, 40]),
        overlap=True,
        drafter=NgramDrafter(DRAFTS, 1, 6),
    )
    core.executor.next_token = text.token
    ahead, launch = 0, core.executor.launch

    def counting(plan):
        nonlocal ahead
        by_row = {request.row: request for request in core.scheduler.running}
        ahead += sum(work.first >= len(by_row[work.row].tokens) for work in plan.work)
        return launch(plan)

    core.executor.launch = counting
    live, asked = [], {}
    while len(live) < 8 or core.has_work:
        if len(live) < 8 and (rng.random() < 0.2 or not core.has_work):
            name, stop = f"r{len(live)}", rng.randrange(VOCAB)
            params = SamplingParams(
                temperature=0,
                max_tokens=rng.randint(1, 60),
                ignore_eos=True,
                stop_token_ids=[stop] if rng.random() < 0.3 else [],
                min_tokens=1 if rng.random() < 0.5 else 0,
            )
            asked[name] = params
            live.append(core.add(name, text.passage[: rng.randint(1, 30)], params))
        core.step()
        if rng.random() < 0.01 and live:
            core.abort(rng.choice(live).request.id)
        leases = [r.lease for r in core.scheduler.running if r.lease is not None]
        check(core.cache, leases)
    assert all_pages_back(core)
    assert ahead > 10
    for continuation in live:
        name, output = continuation.request.id, continuation.stream.output
        found = output.token_ids
        assert found == [text.token(name, i) for i in range(len(found))]
        if output.finish_reason == "length":
            assert len(found) == asked[name].max_tokens


def verifying(guesses: list[int], **asked) -> Request:
    """A request whose guesses are being verified after its first token, the last of ten."""
    params = SamplingParams(temperature=0, **asked)
    request = Request("r", 1, params, 0, (), 50, (0, 0), prompt=[1])
    request.verifying = RowWork(0, 0, [1, *guesses], True, drafts=len(guesses))
    return request


class Counting:
    """Drafts that predict that each token is followed by the next number."""

    drafts, ahead = DRAFTS, 0

    def guess(self, request: Request, most: int) -> list[int]:
        return list(range(request.tokens[-1] + 1, request.tokens[-1] + 1 + most))


def test_only_likely_guesses_that_go_on_are_run_ahead_of() -> None:
    right, other = verifying([2, 3, 4]), verifying([7, 8, 9])
    assert tokens_ahead(Counting(), [right], 99, None) == {right: [5, 6, 7, 8]}
    assert tokens_ahead(Counting(), [right], 3, None) == {right: [5, 6, 7]}
    # The running guesses differ from the current ones; then no row runs ahead.
    assert tokens_ahead(Counting(), [right, other], 99, None) == {}
    reporting = verifying([2, 3, 4], logprobs=1)
    assert tokens_ahead(Counting(), [reporting], 99, None) == {}
    pace = Pace(None, DRAFTS)
    assert tokens_ahead(Counting(), [right], 99, pace) == {}
    for _ in range(30):
        learn(right, DRAFTS, DRAFTS)
    assert tokens_ahead(Counting(), [right], 99, pace) == {right: [5, 6, 7, 8]}
    assert run_ahead.all_right(right, DRAFTS) > LIKELY
