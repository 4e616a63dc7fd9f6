"""The tensors of a step, and its rows as known on the host. Independent of backends."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class PagePlace(NamedTuple):
    """Cache locations of the step's slots in the layers of one page group.

    Attributes:
        page_table: [rows, max_pages] int32, physical page of each logical page. Of a group of
            windowed layers, only entries under a window are valid.
        location: [T] int64, where a slot's fields go: page * page_size + slot % page_size.
    """

    page_table: Tensor
    location: Tensor


class Inserted(NamedTuple):
    """Embeddings that replace those of placeholder tokens.

    Attributes:
        places: [M] int64, their indices in the batch.
        rows: [M, hidden], the embeddings.
    """

    places: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step. T slots run, in R rows; a row's slots are consecutive and ascending.

    Attributes:
        input_ids: [T] int64, the landmark id at landmark slots.
        positions: [T] int64, rotary positions; [axes, T] where they differ by axis.
        row: [T] int64, index into page tables and states.
        slot: [T] int64, place in the row's sequence; -1: padding.
        places: by page group.
        completed: [N] int64, index in the batch of every slot that is the last of its page.
        completed_pages: [N] int64, the physical pages (of the first group) that those slots
            complete; negative: padding.
        max_slot: largest slot of the step, or an upper bound that the host knows.
        watch: [W] int64, indices of the queries whose reads are reported; None: none.
        inserted: embeddings of an encoder; None: all inputs are tokens.
        guesses: in a graph, most guesses of a row; `AttentionBackend.settle` is told there which of
            them count. 0: no row has any.
    """

    input_ids: Tensor
    positions: Tensor
    row: Tensor
    slot: Tensor
    places: tuple[PagePlace, ...]
    completed: Tensor
    completed_pages: Tensor
    max_slot: int
    watch: Tensor | None = None
    inserted: Inserted | None = None
    guesses: int = 0


@dataclass(frozen=True)
class StepRows:
    """The rows of a step as known on the host: those that decode, then those of chunks.

    Attributes:
        row, first, count: [R], each row's number, first slot and number of slots.
        slot: [T], the slots of all rows.
        decoding: number of rows that decode, which come first.
        drafts: [R], how many of each row's last tokens are guesses; None: none are.
    """

    row: Ints
    first: Ints
    count: Ints
    slot: Ints
    decoding: int
    drafts: Ints | None = None

    @functools.cached_property
    def segments(self) -> list[int]:
        """Row, first slot and number of slots of each row, one after the other."""
        joined = np.stack((self.row, self.first, self.count), axis=1)
        return [int(n) for n in joined.ravel()]
