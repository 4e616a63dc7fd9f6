"""Prompts that wait for a prefix that another request computes."""

from __future__ import annotations

import pytest

from cairn import SamplingParams
from cairn.cache.paged import PageCache
from cairn.engine import sharing
from cairn.engine.planned_step import Limits
from cairn.engine.request import Request, RowCounts, State
from cairn.engine.sharing import Computing
from tests.engine.fakes import fake_core

PER_PAGE = 4


def request(name: str, prompt: list[int]) -> Request:
    return Request(name, len(prompt), SamplingParams(), 0, (), 5, (0, 0), prompt)


def running(name: str, prompt: list[int], computed: int = 0) -> Request:
    found = request(name, prompt)
    found.state, found.row = State.RUNNING, 0
    RowCounts(1).start(found, computed)
    return found


@pytest.mark.parametrize(
    ("prompt", "other", "computed", "until"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9], 0, 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 0, 8),
        # Cached pages can be found.
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 4, 8),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 9, 9], 4, None),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4], 4, None),
        # At least one token has to be computed.
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 0, None),
        ([1, 2, 3, 9, 5], [1, 2, 3, 4, 5], 0, None),
        ([1, 2, 3, 4, 5], [1, 2, 3], 0, None),
        ([1], [1, 2, 3, 4], 0, None),
    ],
)
def test_requests_wait_for_a_longer_common_prefix(
    prompt: list[int], other: list[int], computed: int, until: int | None
):
    computing, waiting = Computing(PER_PAGE), request("w", prompt)
    computing.add(running("r", other, computed))
    assert computing.holds(waiting) == (until is not None)
    assert until is None or waiting.held_until == until


def test_requests_wait_until_the_prefix_is_computed_or_aborted():
    computing, waiting = Computing(PER_PAGE), request("w", [1, 2, 3, 4, 5])
    for ends in (False, True):
        other = running("r", [1, 2, 3, 4, 6])
        computing.add(other)
        assert computing.holds(waiting) and computing.holds(waiting)
        if ends:
            other.state = State.FINISHED
            computing.remove(other)
        else:
            assert other.counts is not None
            other.counts.computed[0] = 5
        assert not computing.holds(waiting)
        assert waiting.held_by is None


def test_removed_requests_leave_no_entries():
    computing, other = Computing(PER_PAGE), running("r", [1, 2, 3, 4])
    computing.add(other)
    computing.remove(other)
    computing.remove(running("never", [1, 2, 3, 4]))
    computing.remove(running("short", [1]))
    # A name is free again while the last step of its request runs.
    computing.add(other)
    again = running("r", [5, 6, 7, 8])
    computing.add(again)
    computing.remove(other)
    computing.remove(again)
    assert not computing._by_page


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_crowd_is_admitted_in_time_that_grows_with_it_alone(prefix_caching, monkeypatch):
    """Each looks at neither all other prompts nor the pages promised to each of them."""
    core = fake_core(
        pages=4000, rows=201, step_slots=1 << 14, max_model_len=64, prefix_caching=prefix_caching
    )
    core.scheduler.limits = Limits(201, 1 << 14)
    calls = dict.fromkeys(("compared", "grown"), 0)
    compare, growth = sharing._common_prefix, PageCache.growth

    def counted(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(sharing, "_common_prefix", counted("compared", compare))
    monkeypatch.setattr(PageCache, "growth", counted("grown", growth))
    common = [5] * 12
    core.add("first", [*common, 1], SamplingParams(max_tokens=3))
    core.step()
    calls.update(compared=0, grown=0)
    for i in range(200):
        digits = [i // 100, i // 10 % 10, i % 10, *[7] * 20]
        # Some begin with cached pages.
        core.add(f"r{i}", [*common[: 12 * (i % 2)], *digits], SamplingParams(max_tokens=3))
    core.step()
    assert len(core.scheduler.running) == 201
    assert calls["compared"] == 0 and calls["grown"] <= 3 * 200


def test_pages_promised_to_one_admitted_before_are_not_given_to_the_next():
    """Both arrive in one step: the first computes a chunk of its prompt, and needs the rest."""
    core = fake_core(pages=36, rows=4, step_slots=21, prefix_caching=False)
    core.add("runs", [1, 2], SamplingParams(max_tokens=30))
    core.step()
    core.add("long", [1] * 100, SamplingParams(max_tokens=2))
    core.add("short", [1], SamplingParams(max_tokens=2))
    core.step()
    running = {request.id for request in core.scheduler.running}
    assert running == {"runs", "long"}
