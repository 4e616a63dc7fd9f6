"""Rows draft when it saves time, by measured times and the results of their last drafts."""

from __future__ import annotations

import pytest

from cairn.engine.budget import Load, StepTimes
from cairn.engine.pace import RETRY, Pace, expected, learn
from cairn.engine.request import Request
from cairn.types import SamplingParams

DRAFTS = 8


def request() -> Request:
    return Request("r", 1, SamplingParams(), 0, (), 99, (0, 0), prompt=[1])


def pace(rows: int, longer: float) -> tuple[Pace, Load]:
    """A step of this many rows takes 1 s, and `longer` seconds more if all of them draft."""
    times, load = StepTimes(), Load(rows=rows)
    for _ in range(40):
        times.observe(load, 1.0)
        times.observe(Load(rows=rows, drafts=rows * DRAFTS), 1.0 + longer)
    return Pace(times, DRAFTS), load


@pytest.mark.parametrize(
    ("rows", "longer", "right", "pays"),
    [(1, 0.4, 0, False), (1, 0.4, 8, True), (1, 20.0, 8, False), (64, 0.4, 8, True)],
)
def test_guesses_run_where_they_bring_more_than_they_take(rows, longer, right, pays):
    found, load = pace(rows, longer)
    some = [request() for _ in range(rows)]
    for one in some:
        for _ in range(20):
            learn(one, DRAFTS, right)
    chosen = found.candidates(some, load)
    guesses = {one: [0] * DRAFTS for one in chosen}
    assert bool(chosen and found.pays(guesses, load)) == pays


def test_a_few_of_many_rows_are_not_worth_a_longer_step():
    found, load = pace(64, 0.5)
    good = request()
    learn(good, DRAFTS, DRAFTS)
    assert not found.pays({good: [0] * DRAFTS}, load)


def test_stopped_guessing_is_tried_again():
    found, load = pace(1, 0.4)
    one = request()
    for _ in range(20):
        learn(one, DRAFTS, 0)
    assert expected(one, DRAFTS) < 0.2
    steps = next(n for n in range(1000) if found.candidates([one], load))
    assert 20 < steps < 200
    dear, load = pace(1, 50.0)
    tries = [
        bool(dear.candidates([one], load)) and dear.pays({one: [0] * DRAFTS}, load)
        for _ in range(2 * RETRY + 4)
    ]
    assert sum(tries) == 2
    # A draft layer drafts in the previous step.
    wanted = (step for step in range(2 * RETRY) if dear.candidates([one], load))
    assert next(wanted) and dear.pays({one: []}, load)
    assert dear.candidates([one], load) and dear.pays({one: [0] * DRAFTS}, load)
    assert not dear.candidates([one], load)


def test_the_first_steps_with_guesses_capture_graphs_and_stop_nobody():
    times, load = StepTimes(), Load(rows=1)
    times.observe(load, 0.01)
    found, one, ran = Pace(times, DRAFTS), request(), 0
    for _ in range(100):
        if found.candidates([one], load) and found.pays({one: [0] * DRAFTS}, load):
            ran += 1
            learn(one, DRAFTS, DRAFTS)
            times.observe(Load(rows=1, drafts=DRAFTS), 1.0 if ran == 1 else 0.014)
        else:
            times.observe(load, 0.01)
    assert ran == 100
    # Nor do later rows, of which nothing is known.
    assert times.draft_seconds(Load(drafts=DRAFTS)) == pytest.approx(0.004, rel=0.1)
    assert found.candidates([request()], load)


def test_eight_steps_undo_what_a_capture_took():
    times = StepTimes()
    for _ in range(8):
        times.observe(Load(rows=1), 0.0005)
    for step in range(8):
        times.observe(Load(rows=1, drafts=7, drafts_context=7000), 0.0008 if step else 0.4)
    assert times.decode_seconds(Load(rows=1)) == pytest.approx(0.0005, rel=0.1)
    seconds = times.draft_seconds(Load(drafts=7, drafts_context=7000))
    assert seconds == pytest.approx(0.0003, rel=0.2)


def test_steps_with_guesses_are_learned_apart():
    times = StepTimes()
    for _ in range(30):
        times.observe(Load(rows=2), 1.0)
        times.observe(Load(rows=2, drafts=16), 1.5)
    assert times.decode_seconds(Load(rows=2)) == pytest.approx(1.0, rel=0.05)
    assert times.draft_seconds(Load(drafts=16)) == pytest.approx(0.5, rel=0.1)
    assert times.prefill_seconds(Load(chunks=1, tokens=16)) == 0
