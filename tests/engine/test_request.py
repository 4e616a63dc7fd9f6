"""Tokens of a request, and rows that decode together."""

from __future__ import annotations

import random

import pytest

from cairn.engine.request import Lockstep, Phases, Request, RowCounts
from cairn.types import SamplingParams

ROWS = 9


def request_of(row: int, prompt: int, max_output: int = 1000) -> Request:
    return Request(
        id=f"r{row}",
        num_prompt=prompt,
        params=SamplingParams(),
        seed=0,
        stop_ids=(),
        max_output=max_output,
        order=(0, row),
        prompt=[1] * prompt,
        row=row,
        decoding=True,
    )


@pytest.fixture
def counts() -> RowCounts:
    return RowCounts(ROWS)


@pytest.mark.parametrize("per_page", [1, 3, 15])
def test_rows_side_by_side_are_where_each_would_be_alone(counts, per_page):
    rng = random.Random(per_page)
    requests = [request_of(row, rng.randrange(1, 60)) for row in rng.sample(range(ROWS), 5)]
    for request in requests:
        counts.start(request, request.num_prompt + rng.randrange(5))
    at = [request.planned for request in requests]
    rows = Lockstep(requests, counts, per_page)
    kept = []
    for _ in range(3 * per_page + 2):
        assert list(rows.starting()) == [i for i, n in enumerate(at) if n % per_page == 0]
        assert rows.context == sum(at)
        work = rows.step()
        kept.append((work, at))
        assert list(work.full) == [i for i, n in enumerate(at) if (n + 1) % per_page == 0]
        assert work.count_full(per_page) == work._replace(full=None).count_full(per_page)
        at = [n + 1 for n in at]
        assert [request.planned for request in requests] == at
    # A returned tuple is unchanged: it may be in a message that is being sent.
    for work, first in kept:
        assert work.row is kept[0][0].row
        assert work.row.tolist() == [request.row for request in requests]
        assert work.first.tolist() == first
        number = [n + 1 - r.num_prompt for n, r in zip(first, requests, strict=True)]
        assert work.output_index.tolist() == number


def test_lockstep_counts_steps_left(counts):
    requests = [request_of(0, 10, max_output=7), request_of(1, 30, max_output=4)]
    for request in requests:
        counts.start(request, request.num_prompt)
    rows = Phases.of(requests, counts, 3).decoding
    for left in (3, 2, 1):
        assert rows.left == left
        assert not any(request.complete for request in requests)
        rows.step()
    assert rows.left == 0
    assert [request.complete for request in requests] == [False, True]
    assert Phases.of(requests, counts, 3).decoding.requests == requests[:1]


def test_no_rows(counts):
    rows = Phases.of([], counts, 3).decoding
    assert (rows.requests, rows.context, rows.left, list(rows.starting())) == ([], 0, 0, [])


def test_tokens_follow_the_output():
    request = request_of(0, 3)
    assert request.tokens.tolist() == [1, 1, 1]
    request.output += [5, 6]
    assert request.tokens.tolist() == [1, 1, 1, 5, 6]
    request.output.append(7)
    assert len(request.tokens) == 6
    assert request.tokens.tolist()[3:] == request.output
    assert request.prompt_view().tolist() == [1, 1, 1]
    # A token that is not part of the output.
    request.tokens.append(-1)
    assert request.tokens.tolist() == [1, 1, 1, 5, 6, 7, -1]
