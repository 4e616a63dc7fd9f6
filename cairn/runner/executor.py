"""The interface between scheduler and runner."""

from __future__ import annotations

from typing import Protocol

from cairn.runner.runner import Runner
from cairn.runner.step import Launched, StepPlan


class Executor(Protocol):
    """Runs plans in order."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; the next one may be launched before its result is asked for."""

    def shutdown(self) -> None:
        """Release what the executor holds."""


class InProcessExecutor:
    """Runs plans on a Runner of this process."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step: on a GPU it is only queued, on the CPU it has run on return."""
        return self.runner.launch(plan)

    def shutdown(self) -> None:
        """Nothing to release: the runner goes with its last reference."""
