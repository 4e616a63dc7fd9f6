"""Placement of experts on ranks, and the choice among an expert's copies for each token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.distributed.groups import Group
from cairn.distributed.placement import Ints


class ExpertPlaces:
    """The placement of a mixture's experts on all ranks.

    Args:
        placement: the expert in every place, rank by rank; all ranks have equally many places.
        experts: how many there are, E.
        group: the ranks.
        shared: experts E, E + 1, .. that every token runs, in the places behind the others; each
            rank has its own.

    Attributes:
        placement: [ranks, places].
        loads: [E] int64, tokens that chose each expert; None: not counted.
    """

    def __init__(
        self, placement: tuple[int, ...], experts: int, group: Group, shared: int = 0
    ) -> None:
        self.experts, self._group, self._shared = experts, group, shared
        self.placement: Ints = np.array(placement, dtype=np.int64).reshape(group.size, -1)
        self.loads: Tensor | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    @property
    def held(self) -> tuple[int, ...]:
        """The experts in this rank's places."""
        return tuple(self.placement[self._group.rank].tolist())

    def place(self, placement: Ints) -> None:
        """Change the placement. Tensors keep their addresses, as CUDA graphs need."""
        self.placement = placement
        if self._tables is not None:
            for table, value in zip(self._tables, self._computed(), strict=True):
                table.copy_(value)

    def own(self, ids: Tensor, slots: Tensor) -> Tensor:
        """This rank's places of the chosen experts; -1: another rank runs them.

        Among copies of an expert, a token's position in its sequence decides, so results do not
        depend on the other tokens of the step.

        Args:
            ids: [T, k] int32, the experts; -1: none.
            slots: [T] int64.
        """
        if self._tables is None:
            copies, places = (table.to(ids.device) for table in self._computed())
            self._tables = copies, places
        copies, places = self._tables
        if self.loads is None and self.placement.size == self.experts:
            if ids.is_cuda:
                # Without rounds every token has experts; one kernel less than below.
                return places[:, 0].index_select(0, ids.flatten()).view_as(ids)
            # One copy each; index -1 is the row after the last expert.
            only: Tensor = places[ids, 0]
            return only
        chosen = ids.clamp(min=0).long()
        if self.loads is not None:
            flat = chosen[:, : chosen.shape[1] - self._shared].flatten()
            self.loads.scatter_add_(0, flat, torch.ones_like(flat))
        found = places[chosen, slots.unsqueeze(1) % copies[chosen]]
        return torch.where(ids < 0, -1, found)

    def _computed(self) -> tuple[Tensor, Tensor]:
        """Copies of each expert [E + shared] int64, and this rank's place of each copy
        [E + shared + 1, ranks] int32, -1 in the last row."""
        ranks, count = self.placement.shape
        every = self.experts + self._shared
        copies = np.zeros(every, dtype=np.int64)
        places = np.full((every + 1, ranks), -1, dtype=np.int32)
        copies[self.experts :] = 1
        places[self.experts : every, 0] = np.arange(count, count + self._shared)
        for rank in range(ranks):
            for place in range(count):
                expert = self.placement[rank, place]
                if rank == self._group.rank:
                    places[expert, copies[expert]] = place
                copies[expert] += 1
        return torch.from_numpy(copies), torch.from_numpy(places)
