"""The interface between scheduler and runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cairn.cache.host import Move
from cairn.runner.host_records import HostRecords
from cairn.runner.runner import Runner
from cairn.runner.step import Launched, StepPlan


class Executor(Protocol):
    """Runs plans in order."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; the next one may be launched before its result is asked for."""

    def move(self, moves: Sequence[Move], into_host: bool) -> Sequence[Move]:
        """Move records between device and host memory: see `cairn.cache.host.Mover`."""

    def shutdown(self) -> None:
        """Release what the executor holds."""


class InProcessExecutor:
    """Runs plans on a Runner of this process.

    Args:
        runner: the model with its pages.
        records: those in host memory; None: nothing is moved there.
    """

    def __init__(self, runner: Runner, records: HostRecords | None = None) -> None:
        self.runner = runner
        self.records = records

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step: on a GPU it is only queued, on the CPU it has run on return."""
        return self.runner.launch(plan)

    def move(self, moves: Sequence[Move], into_host: bool) -> Sequence[Move]:
        """Move records; on a GPU behind all that is queued."""
        assert self.records is not None, "an executor without host memory moves no records"
        return self.records.move(moves, into_host)

    def shutdown(self) -> None:
        """Nothing to release: the runner goes with its last reference."""
