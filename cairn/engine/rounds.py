"""Engines that share experts: an engine without work still runs its experts for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from cairn.distributed.groups import Group
from cairn.distributed.rounds import EnginesStopped, Rounds
from cairn.errors import EngineDead
from cairn.layers.moe import MixtureOfExperts
from cairn.runner.executor import Executor, PassingExecutor
from cairn.runner.step import Launched, StepPlan

T = TypeVar("T")


class Engines(NamedTuple):
    """The engines that share experts.

    Attributes:
        group: the process group of the engines.
        on_death: called when a round fails, because another engine may wait for ever in a
            collective.
    """

    group: Group
    on_death: Callable[[EngineDead], object] = lambda error: None


class ExpertRounds:
    """This engine's part in the rounds.

    Args:
        rounds: the rounds.
        module: the model; each forward pass begins a round.
        engines: all engines.
    """

    def __init__(self, rounds: Rounds, module: nn.Module, engines: Engines) -> None:
        self._rounds, self._engines = rounds, engines
        self._mixtures = [m for m in module.modules() if isinstance(m, MixtureOfExperts)]
        module.register_forward_pre_hook(self._begin)

    @property
    def count(self) -> int:
        """Rounds so far."""
        return self._rounds.count

    @torch.inference_mode()
    def idle(self) -> bool:
        """Take part in a round without tokens; False: no engine had tokens."""
        with self.watched():
            if not self._rounds.begin(0):
                return False
            for mixture in self._mixtures:
                mixture.serve_others()
            return True

    def around(self, step: Callable[[], T]) -> T:
        """Run a step and take part in a round even if the step runs nothing, because the others
        wait for it."""
        before = self.count
        found = step()
        if self.count == before:
            self.idle()
        return found

    def stop(self) -> None:
        """Tell the others that this engine ends, in their next round."""
        # Engines that ended before are ignored.
        with suppress(EngineDead):
            self._rounds.begin(0, stops=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: an error inside ends the engine, because the others are in the same
        round."""
        try:
            yield
        except Exception as error:
            told = f"a round of the engines that share experts failed: {error}"
            if not isinstance(error, EnginesStopped):
                self._engines.on_death(error if isinstance(error, EngineDead) else EngineDead(told))
            raise

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._rounds.begin(len(arguments[0].batch.input_ids))


class RoundsExecutor(PassingExecutor):
    """Runs plans on another executor, each pass of the model in a round.

    Args:
        inner: of this engine.
        rounds: of all engines.
    """

    def __init__(self, inner: Executor, rounds: ExpertRounds) -> None:
        super().__init__(inner)
        self._rounds = rounds

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; an error ends the engine."""
        with self._rounds.watched():
            return self._inner.launch(plan)
