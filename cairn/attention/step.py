"""A step as passed to the layers of a model: its tensors, and each layer's backend with its
plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cairn.attention.base import AttentionBackend, LayerReads, StepPlan
from cairn.attention.batch import Batch


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """One layer of a step.

    Attributes:
        index: the layer's number.
        backend: computes it.
        plan: the backend's, of this step.
    """

    index: int
    backend: AttentionBackend
    plan: StepPlan

    @property
    def completed(self) -> Tensor:
        """[N] int64, index in the step of every slot that is the last of its page."""
        return self.plan.batch.completed

    def run(self, inputs: Any) -> Tensor:
        """Run the layer's backend on the inputs of its kind of mixer."""
        return self.backend.run(self.index, inputs, self.plan)

    def kv_target(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Caches and locations, if the layer may write the step's keys and values itself, see
        `AttentionBackend`."""
        return self.backend.kv_target(self.index, self.plan)


@dataclass(frozen=True, slots=True)
class Step:
    """What a model runs.

    Attributes:
        batch: the tensors.
        layers: one entry a layer.
    """

    batch: Batch
    layers: Sequence[BoundLayer]

    def settle(self, counts: Tensor) -> None:
        """Keep the accepted ones of each row's draft tokens, see `AttentionBackend.settle`."""
        for layer in self.layers:
            layer.backend.settle(layer.index, layer.plan, counts)

    def reads(self) -> list[LayerReads]:
        """The reads of the watched queries, by layer."""
        plans = {id(layer.plan): layer.plan for layer in self.layers}
        return sorted((r for plan in plans.values() for r in plan.reads), key=lambda r: r.layer)
