"""The interface of attention backends.

A backend is bound to the cache pools once. `needs` declares the cache fields of a layer; `plan`
runs once per step and computes the backend's metadata; `run` runs once per layer: it writes the
step's keys and values to the cache, then every query masks by its own slot, so a decode token, a
landmark and a prefill chunk go through the same call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from cairn import ops
from cairn.attention.batch import Batch, PagePlace, StepRows
from cairn.attention.cuts import Cuts, Front, Part, attend_in_parts
from cairn.attention.inputs import GqaInputs
from cairn.cache.pools import CachePools
from cairn.cache.schema import LayerSchema, PageFormat

DRAFT_STATE = "state"
"""Field of a draft layer: the model's hidden state of a page's last token."""


@dataclass(frozen=True, slots=True)
class LayerReads:
    """What the W watched queries of a step read in one layer that selects pages.

    Attributes:
        layer: index of the layer.
        pages: [W, h_kv, K] int32 logical pages, -1 where none is selected.
        weights: [W, h_q, K] float32, their shares; 0 where none is selected.
        window: [W, h_q] float32, the window's share of the softmax.
    """

    layer: int
    pages: Tensor
    weights: Tensor
    window: Tensor


@dataclass(slots=True)
class StepPlan:
    """Metadata that a backend computes once a step; backends with more subclass it.

    Attributes:
        batch: the step.
        cuts: how its slots are cut into parts.
        rows: its rows as known on the host; None inside a graph.
        segments: the same for ops, see `StepRows`.
        reads: what the watched queries read, one entry a layer that selects.
    """

    batch: Batch
    cuts: Cuts
    rows: StepRows | None
    segments: list[int] | None = None
    reads: list[LayerReads] = field(default_factory=list)

    def attend(
        self, attend: Callable[[Part], Tensor], *, tiled: bool, by_fronts: bool = False
    ) -> Tensor:
        """See `attend_in_parts`."""
        return attend_in_parts(
            self.batch, self.cuts, self.segments, attend, tiled=tiled, by_fronts=by_fronts
        )


class AttentionBackend(ABC):
    """Base class of attention backends. `run` may not allocate memory that grows with the context.

    Args:
        pools: the cache.
        layers: layer index -> spec of its mixer, for the layers that the backend computes.
    """

    name: ClassVar[str]
    longest_in_graphs: ClassVar[int | None] = None
    """Longest row in slots that a CUDA graph may prefill: for longer ones `run` is faster if the
    host knows the rows. None: no limit."""

    def __init__(self, pools: CachePools, layers: Mapping[int, Any]) -> None:
        self.pools = pools
        self.layers = dict(layers)

    @classmethod
    @abstractmethod
    def needs(cls, spec: Any, form: PageFormat) -> LayerSchema:
        """The cache fields of a layer.

        Args:
            spec: of the layer's mixer.
            form: storage format of pages.
        """

    @classmethod
    def most_pages(cls, spec: Any) -> int | None:
        """Most pages of a row for which the layer has kernels on a GPU; None: any number.

        Args:
            spec: of the layer's mixer.
        """
        return None

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> StepPlan:
        """Compute the metadata that `run` needs, without a device synchronisation."""
        segments = None if rows is None else rows.segments
        return StepPlan(batch, cuts, rows, segments)

    @abstractmethod
    def run(self, layer: int, inputs: Any, plan: Any) -> Tensor:
        """Write the step's keys and values to the layer's cache, then attend.

        Args:
            layer: its number.
            inputs: of the layer's kind of mixer, see `cairn.attention.inputs`.
            plan: from `plan`, of this step.
        """

    def settle(self, layer: int, plan: Any, counts: Tensor) -> None:  # noqa: B027 - pages need none
        """Called after a step with draft tokens (guesses), once they are verified. On return the
        cache must not contain anything of a rejected draft token that a later step would read
        before it writes.

        Args:
            layer: its number.
            plan: from `plan`, of this step.
            counts: [rows + 1] int64, by row, its accepted tokens: of a row with guesses at least
                the first, which is not a guess.
        """

    def fronts(self) -> tuple[Front, ...]:
        """Limits of the first slots of rows that `run` computes with other kernels, ascending."""
        return ()

    def kv_target(self, layer: int, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor] | None:
        """Key cache, value cache and locations [T], for a layer that writes the step's keys and
        values itself; None: it gives them to `run`."""
        return None


class GqaBackend(AttentionBackend):
    """Base class of backends of layers whose cache has keys and values by head."""

    def written(self, layer: int) -> tuple[str, str]:
        """Cache fields to which a step's keys and values are written."""
        return "k", "v"

    @classmethod
    def needs(cls, spec: Any, form: PageFormat) -> LayerSchema:
        """Keys and values."""
        return LayerSchema(form.keys_and_values(spec.num_kv_heads, spec.head_dim))

    def place(self, layer: int, plan: StepPlan) -> PagePlace:
        """Page table and locations of a layer's slots of the step."""
        return plan.batch.places[self.pools.schema.group_of[layer][self.written(layer)[0]]]

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """The caches to which a step's keys and values are written, each [pages, h_kv, S, d]."""
        k, v = self.written(layer)
        return self.pools.pages[layer][k], self.pools.pages[layer][v]

    def kv_target(self, layer: int, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor] | None:
        """See the base; for caches that are not quantised."""
        k_cache, v_cache = self.caches(layer)
        if not k_cache.dtype.is_floating_point:
            return None
        return k_cache, v_cache, self.place(layer, plan).location

    def write(self, layer: int, inputs: GqaInputs, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Store the step's keys and values, if they are given; returns the two caches."""
        k_cache, v_cache = self.caches(layer)
        if inputs.k is not None and inputs.v is not None:
            location = self.place(layer, plan).location
            ops.write_kv(inputs.k, inputs.v, k_cache, v_cache, location)
        return k_cache, v_cache
