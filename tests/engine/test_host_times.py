"""Host times of decode steps, with a fake clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cairn.runner.step import StepPlan, StepResult
from cairn.types import SamplingParams
from tests.engine.fakes import drain, fake_core

PLAN, LAUNCH, WAIT, CALLER = 0.5, 2.0, 64.0, 8.0


class Clocked:
    """An executor, and the clock of its engine."""

    def __init__(self, core, runs_at_once: bool) -> None:
        self.now, self.core, self.inner = 0.0, core, core.executor
        self.runs_at_once = runs_at_once
        core.executor, core.clock = self, lambda: self.now
        schedule = core.scheduler.schedule

        def planned():
            self.now += PLAN
            return schedule()

        core.scheduler.schedule = planned

    def launch(self, plan: StepPlan):
        # A step with prefill takes far longer in every respect.
        factor = 100 if plan.work else 1
        self.now += (LAUNCH + WAIT * self.runs_at_once) * factor
        return Pending(self, factor, self.inner.launch(plan).value)


class Pending:
    def __init__(self, clock: Clocked, factor: int, value: StepResult) -> None:
        self.clock, self.factor, self.value = clock, factor, value

    def result(self) -> StepResult:
        if not self.clock.runs_at_once:
            self.clock.now += WAIT * self.factor
        return self.value._replace(model_seconds=WAIT * self.factor)


@pytest.mark.parametrize("overlap", [True, False])
def test_neither_the_wait_nor_prefill_counts(overlap):
    core = fake_core(overlap=overlap, pages=200)
    clock = Clocked(core, runs_at_once=not overlap)
    for name in "ab":
        core.add(name, [1] * 20, SamplingParams(max_tokens=30))
    while core.has_work:
        if core.stats.steps == 10 and len(core.scheduler.running) < 3:
            core.add("late", [2] * 20, SamplingParams(max_tokens=5))
        core.step()
        clock.now += CALLER
    steady = core.stats.steady
    assert 15 < steady.steps < core.stats.steps - 1
    assert steady.plan == PLAN * steady.steps
    assert steady.launch == LAUNCH * steady.steps
    assert steady.results == 0
    # With overlap, the caller's time is between two results; without, it is between two steps.
    assert steady.other == (CALLER * steady.steps if overlap else 0)


def test_a_difference_is_what_came_between():
    core = fake_core()
    Clocked(core, runs_at_once=True)
    core.add("a", [1] * 5, SamplingParams(max_tokens=9))
    core.step()
    before = replace(core.stats.steady)
    drain(core)
    gained = core.stats.steady - before
    assert (gained.steps, gained.plan, gained.launch) == (8, 8 * PLAN, 8 * LAUNCH)
