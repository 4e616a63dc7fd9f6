"""Counts which experts tokens choose, and moves experts between ranks (EPLB)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cairn.distributed.groups import Group
from cairn.distributed.placement import Ints, imbalance, rebalanced
from cairn.layers.expert_places import ExpertPlaces
from cairn.layers.moe import MixtureOfExperts

log = logging.getLogger(__name__)


class _Move(NamedTuple):
    """The move of an expert: source rank and place, target rank and place."""

    source: int
    taken: int
    target: int
    place: int


class ExpertBalance:
    """Expert placement of a model's mixtures under expert parallelism.

    Args:
        model: the model that the ranks run.
        group: the ranks.

    Attributes:
        layers: number of mixtures.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._group = group
        modules = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
        self._mixtures = [(m, m.places) for m in modules if m.places is not None]
        self.layers = len(self._mixtures)
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        for mixture, places in self._mixtures:
            weight = mixture.router.weight
            places.loads = weight.new_zeros(places.experts, dtype=torch.int64)

    @torch.inference_mode()
    def rebalance(self, first: int, count: int) -> list[tuple[float, float]]:
        """Rebalance the experts of mixtures first, first + 1, ... by the counts since the last
        call; a collective of all ranks.

        Returns:
            For each mixture the largest load of a rank divided by the mean load, before and after.
        """
        return [self._place(*each) for each in self._mixtures[first : first + count]]

    def _place(self, mixture: MixtureOfExperts, places: ExpertPlaces) -> tuple[float, float]:
        assert places.loads is not None
        loads, today = places.loads.clone().cpu().numpy(), places.placement
        places.loads.zero_()
        # Rank 0 decides, so that all ranks have the same placement.
        decided = torch.from_numpy(rebalanced(loads, today, mixture.spec.router.groups))
        device = mixture.router.weight.device
        wanted: Ints = self._group.of_first(decided.to(device)).cpu().numpy()
        before = imbalance(loads, today)
        if not self._moved(mixture, list(moves_between(today, wanted))):
            log.warning("no memory to move experts: they stay where they are")
            return before, before
        places.place(wanted)
        return before, imbalance(loads, wanted)

    def _moved(self, mixture: MixtureOfExperts, moves: list[_Move]) -> bool:
        """Move experts to their new places. Weights are overwritten only when all have arrived;
        False: a rank had no memory to receive them."""
        rank = self._group.rank
        tensors = [p.data for each in (mixture.gate_up, mixture.down) for p in each.parameters()]
        arriving: dict[_Move, list[Tensor]] = {}
        try:
            for move in moves:
                if move.target == rank:
                    arriving[move] = [torch.empty_like(tensor[move.place]) for tensor in tensors]
            fits = 1
        except (MemoryError, RuntimeError):
            fits = 0
        if not self._group.least(fits, tensors[0].device):
            return False
        for move in moves:
            for i, tensor in enumerate(tensors):
                if move.source == rank:
                    self._group.send(tensor[move.taken], move.target)
                elif move.target == rank:
                    self._group.receive(arriving[move][i], move.source)
        for move, found in arriving.items():
            for tensor, value in zip(tensors, found, strict=True):
                tensor[move.place].copy_(value)
        return True


def moves_between(today: Ints, wanted: Ints) -> Iterator[_Move]:
    """The necessary moves, in the same order on all ranks; the source is the lowest rank that has
    the expert."""
    for target, row in enumerate(wanted):
        for place, expert in enumerate(row):
            if today[target, place] != expert:
                source, taken = (
                    int(n) for n in next(zip(*(today == expert).nonzero(), strict=True))
                )
                yield _Move(source, taken, target, place)
