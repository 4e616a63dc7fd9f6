"""A model without layers, whose tokens follow from slot and row, to test graphs without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.attention.batch import Batch, StepRows
from cairn.attention.cuts import WHOLE, Cuts, Cutter, Front
from cairn.attention.step import Step
from cairn.runner.rows import Layout

VOCAB, LANDMARK, MAX_PAGES = 23, 23, 40


class NoBackends:
    """Backends of a model without layers.

    Attributes:
        cuts: of the step planned last.
    """

    settles = False

    def __init__(self, limits: Sequence[Front] = (), longest_in_graphs: int | None = None) -> None:
        self.cutter = Cutter(limits)
        self.longest_in_graphs = longest_in_graphs
        self.cuts = WHOLE

    def step(self, batch: Batch, cuts: Cuts = WHOLE, rows: StepRows | None = None) -> Step:
        assert rows is None, "the host knows no rows inside a graph"
        self.cuts = cuts
        return Step(batch, ())


class Model:
    """Its largest logit is determined by slot and row."""

    def __init__(self) -> None:
        self.batch: Batch | None = None

    def __call__(self, step: Step) -> Tensor:
        self.batch = batch = step.batch
        return (batch.slot * 7 + batch.row)[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB, VOCAB).float()


def chosen(slot: int, row: int) -> int:
    """The token that the model generates after a slot."""
    return (slot * 7 + row) % VOCAB


def check_batch(batch: Batch, layout: Layout, told: np.ndarray, spare: Sequence[int]) -> None:
    """A graph's batch equals the layout, with padding that belongs to no row.

    Args:
        told: last tokens of the rows.
        spare: by page group, the page of nobody; pages have 4 slots.
    """
    arrays = layout.arrays
    count, closed = len(arrays.slot), len(arrays.completed)
    ids = np.where(arrays.ids < 0, told[arrays.row], arrays.ids)
    assert batch.input_ids[:count].tolist() == ids.tolist()
    for tensor, array in (
        (batch.positions, arrays.position),
        (batch.row, arrays.row),
        (batch.slot, arrays.slot),
    ):
        assert tensor[:count].tolist() == array.tolist()
    assert batch.completed[:closed].tolist() == arrays.completed.tolist()
    assert batch.completed_pages[:closed].tolist() == arrays.completed_pages.tolist()
    assert set(batch.slot[count:].tolist()) <= {-1}
    assert set(batch.completed_pages[closed:].tolist()) <= {-1}
    for place, locations, page in zip(batch.places, arrays.locations, spare, strict=True):
        assert place.location[:count].tolist() == locations.tolist()
        assert set(place.location[count:].tolist()) <= {page * 4}
