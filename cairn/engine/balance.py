"""Rebalances experts over ranks every N steps, a few layers at a time between two steps."""

from __future__ import annotations

import logging

from cairn.runner.executor import Executor, PassingExecutor
from cairn.runner.step import Launched, StepPlan
from cairn.specs.experts import Balance

log = logging.getLogger(__name__)


class BalancingExecutor(PassingExecutor):
    """Runs plans on another executor, and rebalances experts before some of them.

    Args:
        inner: the executor of all ranks.
        balance: interval in steps, and layers per rebalancing.
        layers: number of layers with experts.
    """

    def __init__(self, inner: Executor, balance: Balance, layers: int) -> None:
        super().__init__(inner)
        self._balance, self._layers = balance, layers
        self._steps, self._next = 0, layers

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step."""
        if self._next < self._layers:
            first, count = self._next, self._balance.chunk
            found = self._inner.call("experts.rebalance", first=first, count=count)
            self._next += count
            before, now = (max(ratios) for ratios in zip(*found, strict=True))
            told = "experts were placed anew, %d layers from the %d. on: the busiest rank had %.2f "
            log.info(told + "times the mean load, %.2f now", len(found), first + 1, before, now)
        self._steps += 1
        if self._steps % self._balance.every == 0:
            self._next = 0
        return self._inner.launch(plan)
