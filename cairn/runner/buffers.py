"""The input tensors of a step, for eager steps and for CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.attention.batch import Batch, Inserted, PagePlace
from cairn.runner.staging import overwrite, send
from cairn.runner.step import Ints


class StepArrays(NamedTuple):
    """A step on the host; the fields are those of StepFields.

    Attributes:
        ids: [T], token ids, or LAST_TOKEN.
        position: [T], or [axes, T] where it differs by axis; such a step is in no graph.
        row, slot: [T].
        completed, completed_pages: [N].
        locations: by page group, [T].
    """

    ids: Ints
    position: Ints
    row: Ints
    slot: Ints
    completed: Ints
    completed_pages: Ints
    locations: tuple[Ints, ...]


class StepFields(NamedTuple):
    """A step on the device: the fields of a Batch, except the page tables.

    Attributes:
        ids, position, row, slot: int64, see Batch.
        completed, completed_pages: [N] int64.
        locations: by page group, [T] int64.
    """

    ids: Tensor
    position: Tensor
    row: Tensor
    slot: Tensor
    completed: Tensor
    completed_pages: Tensor
    locations: tuple[Tensor, ...]

    @classmethod
    def sent(cls, arrays: StepArrays, device: torch.device) -> StepFields:
        """Copy the arrays to newly allocated device tensors, in one copy."""
        ids, position, row, slot, completed, pages, *locations = send(_flat(arrays), device)
        return cls(ids, position, row, slot, completed, pages, tuple(locations))

    def batch(
        self,
        page_tables: Sequence[Tensor],
        max_slot: int,
        watch: Tensor | None = None,
        inserted: Inserted | None = None,
    ) -> Batch:
        """The Batch of these fields with the page tables, by group."""
        places = zip(page_tables, self.locations, strict=True)
        return Batch(
            input_ids=self.ids,
            positions=self.position,
            row=self.row,
            slot=self.slot,
            places=tuple(PagePlace(*place) for place in places),
            completed=self.completed,
            completed_pages=self.completed_pages,
            max_slot=max_slot,
            watch=watch,
            inserted=inserted,
        )


class StepBuffers:
    """Buffers at fixed addresses from which graphs read steps of up to `slots` slots.

    Args:
        slots: slots of the largest step.
        spare_locations: by page group, a slot of the spare page, to which padding writes.
        device: where.
    """

    def __init__(self, slots: int, spare_locations: Sequence[int], device: torch.device) -> None:
        # Padding after the values of a step.
        self._padding = StepArrays(
            ids=_one(0),
            position=_one(0),
            row=_one(0),
            slot=_one(-1),
            completed=_one(0),
            completed_pages=_one(-1),
            locations=tuple(_one(location) for location in spare_locations),
        )
        self._fields = len(_flat(self._padding))
        self._memory = torch.zeros(self._fields * slots, dtype=torch.int64, device=device)

    @property
    def memory(self) -> Tensor:
        """All buffers."""
        return self._memory

    def write(self, arrays: StepArrays | None, bucket: int) -> None:
        """Queue a copy of a step, padded to `bucket` slots; None: padding alone."""
        numbers: NDArray[np.int64] = np.empty((self._fields, bucket), dtype=np.int64)
        numbers[:] = np.concatenate(_flat(self._padding))[:, None]
        if arrays is not None:
            for line, values in zip(numbers, _flat(arrays), strict=True):
                line[: len(values)] = values
        overwrite(self._lines(bucket), numbers)

    def fields(self, bucket: int, closing: int) -> StepFields:
        """The views that a graph of `bucket` slots, which complete at most `closing` pages,
        reads."""
        ids, position, row, slot, completed, pages, *locations = self._lines(bucket).unbind()
        done = completed[:closing], pages[:closing]
        return StepFields(ids, position, row, slot, *done, tuple(locations))

    def _lines(self, bucket: int) -> Tensor:
        return self._memory[: self._fields * bucket].view(self._fields, bucket)


def _one(number: int) -> Ints:
    return np.array([number], dtype=np.int64)


def _flat(arrays: StepArrays) -> tuple[Ints, ...]:
    return (
        arrays.ids,
        arrays.position,
        arrays.row,
        arrays.slot,
        arrays.completed,
        arrays.completed_pages,
        *arrays.locations,
    )
