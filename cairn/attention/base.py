"""What every attention backend is given and must do.

A backend is bound to the cache pools once; `run` is called once a layer with the queries, keys
and values of a whole step. It writes the keys and values, then every query masks by its own slot,
so a decode token, a landmark and a prefill chunk go through the same call.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cairn import ops
from cairn.cache.pools import CachePools, CacheSpec
from cairn.ops.attention.launch import SPLIT_TOKENS
from cairn.ops.landmark.select_task import short_pages


@dataclass(frozen=True, slots=True)
class LandmarkRule:
    """How a landmark layer chooses and weighs its pages.

    Attributes:
        topk: pages selected per query and KV head.
        window: slots of the local window (aligned down to a page start).
        softmax1: a zero logit joins the page softmax.
        summary: "prior" (pooled by a query), "mean" (of the keys) or "landmark" (its own key).
        bias: the summary carries the entropy of a prior pooling.
        group_query: the prior query is the mean over the group (one key per KV head).
        strategy: "hils", "group", "head" or "softmax_head".
    """

    topk: int
    window: int
    softmax1: bool
    summary: str
    bias: bool
    group_query: bool = False
    strategy: str = "hils"

    def short_pages(self, page_size: int) -> int:
        """Pages of the longest row whose every page left of the window is selected; 0 for a rule
        without a window."""
        return short_pages(page_size, self.window, self.topk) if self.window else 0


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer as its backend sees it.

    Attributes:
        index: layer number, also the index into the pools.
        backend: name of the backend that computes it.
        num_heads, num_kv_heads, head_dim: shape of the queries and of the cache.
        window: slots seen by a plain window layer, None: full causal.
        mask_landmarks: keys of landmark slots are invisible.
        landmark: the selection rule, None for a layer without one.
    """

    index: int
    backend: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    mask_landmarks: bool = False
    landmark: LandmarkRule | None = None

    @property
    def selects(self) -> bool:
        """Whether its backend looks for pages; others take a landmark layer for a window, or for a
        dense one."""
        return self.landmark is not None and self.backend == "hsa"


@dataclass(frozen=True, slots=True)
class LayerReads:
    """What the W watched queries of a step read in one landmark layer.

    Attributes:
        layer: index of the layer.
        pages: [W, h_kv, K] int32 logical pages, -1 where none is selected.
        weights: [W, h_q, K] float32, their shares; 0 where none is selected.
        window: [W, h_q] float32, the window's share.
    """

    layer: int
    pages: Tensor
    weights: Tensor
    window: Tensor


CHUNK = 16
"""Slots of a row in the mean, from which on a step's slots count as chunks."""
ALONE = (16, 64, 256)
"""How many of a step's first slots may be attended one by one, beside multiples of the last: few
numbers, for each of which kernels are compiled and graphs captured."""
LEAST_EARLY = 256
"""Fewer slots of the first front than these are attended with others that are not of it."""
ROUND = 16
"""Slots of a front that are cut off are a multiple of it: kernels are compiled for addresses as
round as those of a whole step."""


class Front(NamedTuple):
    """Slots side by side in a step that are among the first pages of their rows.

    Attributes:
        slots: how many; or in a row, how many there are: a multiple of ROUND.
        pages: of a row.
    """

    slots: int
    pages: int


def fronts_of(
    backends: Iterable[tuple[AttentionBackend, AttentionLayer]], page_size: int
) -> tuple[Front, ...]:
    """The fronts of a row in which landmark layers go about it another way: where each of them
    selects every page left of its window; and where it passes over them all, if any backend does
    so. None where no layer looks for pages."""
    looking = [(backend, layer) for backend, layer in backends if layer.landmark and layer.selects]
    rules = [layer.landmark for _, layer in looking if layer.landmark]
    early = min((rule.short_pages(page_size) for rule in rules), default=0)
    near = min((backend.near_pages(layer) for backend, layer in looking), default=0)
    pages = [early, near if near > early else 0]
    return tuple(Front(n * page_size // ROUND * ROUND, n) for n in pages if n)


def alone(rows: int, slots: int) -> int:
    """How many of a step's first slots are attended one by one where so many rows decode in front
    of chunks: they, and with them a few of the chunks', or all there are. That costs each of these
    what it would as a row; in a tile a row costs all slots of the tile another pass."""
    if not rows:
        return 0
    whole = -(-rows // ALONE[-1]) * ALONE[-1]
    return min(slots, next((n for n in ALONE if n >= rows), whole))


@functools.cache
def fewest_rows(apart: int, slots: int) -> int:
    """How many rows decode at least where `alone` gives so many slots."""
    return next(rows for rows in range(apart + 1) if alone(rows, slots) == apart)


@dataclass(frozen=True, slots=True)
class Part:
    """Slots of a step that an op attends together.

    Attributes:
        at: which; None: all.
        row, slot, stretches, chunked: as in Batch.
        pages: they are among so many first ones of their rows, see Batch.fronts; None: or not.
    """

    at: slice | None
    row: Tensor
    slot: Tensor
    stretches: list[int] | None
    chunked: bool
    pages: int | None

    def of(self, lines: Tensor) -> Tensor:
        """Those of [T, ..]."""
        return lines if self.at is None else lines[self.at]


@dataclass(slots=True)
class Batch:
    """The tensors of one step. T slots run, in R rows; a row's slots are consecutive and ascending.

    Attributes:
        input_ids: [T] int64, the landmark id at landmark slots.
        positions: [T] int64, rotary positions.
        row: [T] int64, index into `page_table`.
        slot: [T] int64, place in the row's sequence.
        location: [T] int64, where keys and values go: page * page_size + slot % page_size.
        page_table: [rows, max_pages] int32, physical page of each logical page.
        completed: [N] int64, index in the batch of every slot that is the last of its page.
        completed_pages: [N] int64, the physical pages those slots complete; negative: padding.
        max_slot: largest slot of the step, known on the host.
        stretches: row, first slot and number of slots of each row that runs, one after the other,
            known on the host; None: the host does not say.
        backends: layer index -> (backend, layer).
        chunked: the slots are chunks of rows, dozens side by side, and not each of another row.
        alone: so many of the first slots are mostly of rows that decode, the others of chunks. What
            cuts slots into tiles passes over a tile once for each of its rows: these are attended
            by themselves.
        fronts: of the next slots those that are in the first of `fronts_of` their rows, if they are
            worth it; behind them all others, if they are in the second. To part with some of these
            would cost more than it saves: fewer at a time take longer each.
        window_place: page table and locations of window layers that have pages of their own; None:
            all layers share the pages. Only entries under a window are anything.
        watch: [W] int64, indices of the queries whose reads are wanted; None: nobody asks.
        reads: what the watched queries read, one entry a landmark layer.
    """

    input_ids: Tensor
    positions: Tensor
    row: Tensor
    slot: Tensor
    location: Tensor
    page_table: Tensor
    completed: Tensor
    completed_pages: Tensor
    max_slot: int
    backends: Mapping[int, tuple[AttentionBackend, AttentionLayer]]
    stretches: list[int] | None = None
    chunked: bool = False
    alone: int = 0
    fronts: tuple[Front, ...] = ()
    window_place: tuple[Tensor, Tensor] | None = None
    watch: Tensor | None = None
    reads: list[LayerReads] = field(default_factory=list)
    _memo: dict[Hashable, Any] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        lmk_q: Tensor | None = None,
        summary_query: Tensor | None = None,
    ) -> Tensor:
        """Attend in layer `layer`: q [T, h_q, d], k, v [T, h_kv, d] -> [T, h_q, d] in q's dtype.

        Args:
            k, v: None if they are where `target` said.
            lmk_q: [T, h_q, d], the query that scores pages; landmark layers only.
            summary_query: [N, h_q, d], the query that pools each completed page, in layers with a
                prior summary; None: the lmk_q of the page's last slot.
        """
        backend, description = self.backends[layer]
        return backend.run(q, k, v, description, self, lmk_q, summary_query)

    def target(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """k_cache, v_cache and location of layer `layer`, for a model that writes the step's keys
        and values itself; None: it has to give them to `attend`."""
        backend, description = self.backends[layer]
        caches = backend.target(description)
        return None if caches is None else (*caches, backend.place(self)[1])

    def attend_parts(
        self, tiled: bool, attend: Callable[[Part], Tensor], by_fronts: bool = False
    ) -> Tensor:
        """What `attend` gives of the step's slots [T, h_q, d]: of all, or where it would cut them
        into tiles, of those that are alone, as many at a time as it does not cut, of those of each
        front, if these make a difference, and of the others."""
        total, fronts = len(self.slot), self.fronts if by_fronts else ()
        starts = [*itertools.accumulate((front.slots for front in fronts), initial=self.alone)]
        bounds = [*range(0, self.alone, SPLIT_TOKENS), *starts, total]
        cuts = [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]
        if not tiled or len(cuts) == 1 or self.watch is not None:
            everything = (self.row, self.slot, self.stretches, self.chunked)
            whole = [front.pages for front in fronts if front.slots == total]
            return attend(Part(None, *everything, whole[0] if whole else None))
        pages = {start: front.pages for start, front in zip(starts, fronts, strict=False)}
        parts = []
        for at in cuts:
            stretches = None if self.stretches is None else _cut(self.stretches, at)
            chunked = self.chunked and at.start >= self.alone
            own = (self.row[at], self.slot[at], stretches, chunked)
            parts.append(attend(Part(at, *own, pages.get(at.start))))
        return torch.cat(parts)

    def memo(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """A value that all layers of this step share, computed by the first that asks."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]  # type: ignore[no-any-return]


def _cut(stretches: list[int], at: slice) -> list[int]:
    """Those of the slots `at` of a step."""
    found, begin = [], 0
    for row, first, count in zip(*(iter(stretches),) * 3, strict=True):
        low, high = max(begin, at.start), min(begin + count, at.stop)
        if low < high:
            found += [row, first + low - begin, high - low]
        begin += count
    return found


class AttentionBackend(ABC):
    """One way to attend. `run` may not allocate memory that grows with the context."""

    name: ClassVar[str]
    longest_in_graphs: ClassVar[int | None] = None
    """Slots of the longest row that a graph may prefill: with longer ones `run` is faster where the
    host says which rows there are. None: any number."""

    def __init__(self, pools: CachePools) -> None:
        self.pools = pools

    @classmethod
    def needs(cls, layer: AttentionLayer) -> CacheSpec:
        """What the layer stores per page: keys and values, unless a backend adds to it."""
        return CacheSpec(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim)

    @abstractmethod
    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: Batch,
        lmk_q: Tensor | None,
        summary_query: Tensor | None,
    ) -> Tensor:
        """Write the step's keys and values, then attend. Shapes as in `Batch.attend`."""

    def near_pages(self, layer: AttentionLayer) -> int:
        """Pages of rows so short that `run` is told of them: it goes about them another way. 0:
        none."""
        return 0

    def place(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Page table and locations of this backend's layers."""
        return batch.page_table, batch.location

    def target(self, layer: AttentionLayer) -> tuple[Tensor, Tensor] | None:
        """The layer's two caches, where `run` needs no more of keys and values than those hold, and
        these hold them as they are."""
        if self.pools.form.quantized:
            return None
        return self.pools.k[layer.index], self.pools.v[layer.index]

    def write(
        self, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Store k, v [T, h_kv, d], if given, at the step's locations; returns the two caches."""
        k_cache, v_cache = self.pools.k[layer.index], self.pools.v[layer.index]
        if k is not None and v is not None:
            ops.write_kv(k, v, k_cache, v_cache, self.place(batch)[1])
        return k_cache, v_cache
