"""Attention over the records of a window and over compressed entries, one for every m tokens.

The cache has records, and the inputs that entries are computed from, for the tokens within a
window; entries and their index keys for the whole sequence. An entry is computed from the stored
inputs of its tokens when the last of them runs. So it does not depend on how a prompt was divided
into chunks, and the writes of a rejected draft token are overwritten before they are read.

An entry lies in the page of its last token. A page of S slots holds S / m of them, or 1 if m tokens
fill several pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, StepPlan
from cairn.attention.batch import Batch, StepRows
from cairn.attention.cuts import Cuts
from cairn.attention.first_slot import draft_fields
from cairn.attention.index_selection import IndexKeys, select_cells
from cairn.attention.inputs import CompressedInputs, Compression, EntryInputs, IndexInputs
from cairn.attention.mla_format import INDEX_KEY, RECORD, IndexFormat, index_field
from cairn.cache.pools import CachePools
from cairn.cache.schema import BYTES, LayerSchema, PageField, PageFormat
from cairn.errors import BadConfig
from cairn.ops.sparse_mla.records import WHOLE_TILE, whole_bytes
from cairn.specs.backends import COMPRESSED
from cairn.specs.compressed import CompressedSpec, CompressionSpec

ENTRY, INPUTS = "entry", "inputs"


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a rate that a step reads and writes.

    Attributes:
        size: entries per page.
        page_table: [rows, pages] int32, of the pages that hold entries.
        seen: [T] int32, entries that each query sees.
        width: the most that any of them sees.
        location: [T] int64, location of the entry that a token completes: page * size + place in
            the page; -1: it completes none.
    """

    size: int
    page_table: Tensor
    seen: Tensor
    width: int
    location: Tensor


@dataclass(slots=True, kw_only=True)
class CompressedPlan(StepPlan):
    """Metadata of compressed attention for a step.

    Attributes:
        windows: by their length, the cells [T, W] int32 of each query's window, the newest first,
            and how many it has [T] int32.
        entries: by rate.
    """

    windows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    entries: dict[int, Entries] = field(default_factory=dict)


class CompressedBackend(AttentionBackend):
    """One softmax over the records of a window, the entries of earlier tokens, and a sink."""

    name: ClassVar[str] = COMPRESSED

    def __init__(self, pools: CachePools, layers: Mapping[int, CompressedSpec]) -> None:
        super().__init__(pools, layers)
        self._windows = {spec.window for spec in self.layers.values()}
        found = (spec.compression for spec in self.layers.values())
        self._rates = {own.rate for own in found if own is not None}
        groups = [pools.schema.group_of[layer] for layer in layers]
        self._window_group = {own[RECORD] for own in groups}.pop()
        self._index = {
            layer: IndexFormat.of(entry, spec.compression.index_dim)
            for layer, spec in self.layers.items()
            for entry in pools.schema.layers[layer].pages
            if entry.name == INDEX_KEY and spec.compression is not None
        }

    @classmethod
    def needs(cls, spec: CompressedSpec, form: PageFormat) -> LayerSchema:
        """Records and inputs of entries for the tokens that a window reaches; entries and index
        keys for the whole sequence.

        Raises:
            BadConfig: for pages whose format does not hold them.
        """
        own = spec.compression
        numbers, dtype = _record(spec, form)
        record = PageField(RECORD, (form.page_size, numbers), dtype, window=spec.window)
        if own is None:
            return LayerSchema((record, *draft_fields(spec.draft_width, form)))
        count = entries_of_page(form.page_size, own.rate)
        width = 2 * (1 + own.overlap) * (spec.head_dim + (own.index_dim if own.index_heads else 0))
        fields = [
            record,
            PageField(INPUTS, (form.page_size, width), torch.float32, window=own.reach),
            PageField(ENTRY, (count, numbers), dtype),
        ]
        if own.index_heads:
            fields.append(index_field(own.index_dim, replace(form, page_size=count)))
        return LayerSchema(tuple(fields))

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> CompressedPlan:
        """Compute the cells of windows, and the entries that are seen and written."""
        segments = None if rows is None else rows.segments
        return CompressedPlan(
            batch=batch,
            cuts=cuts,
            rows=rows,
            segments=segments,
            windows={window: self._window(batch, window) for window in self._windows},
            entries={rate: self._entries(batch, rate) for rate in self._rates},
        )

    def run(self, layer: int, inputs: CompressedInputs, plan: CompressedPlan) -> Tensor:
        """Attend: -> [T, H, D] float32, or q's dtype in a layer without entries."""
        spec, fields, q = self.layers[layer], self.pools.pages[layer], inputs.q
        location = plan.batch.places[self._window_group].location
        self._store_records(layer, inputs.kv, fields[RECORD], location)
        own, given = spec.compression, inputs.entries
        cells, length = plan.windows[spec.window]
        if spec.draft_width:
            # The first slot, the last in a list, is not a key: see `first_slot`.
            length = torch.minimum(length, plan.batch.slot.clamp(min=0))
        read = (q, fields[RECORD], cells, length, spec.scale, spec.head_dim)
        if own is None or given is None:
            o, _ = ops.sparse_mla(*read, inputs.sink, dtype=q.dtype)
            return o
        entries = plan.entries[own.rate]
        self._store(layer, given, plan, q.dtype)
        if given.index is not None:
            chosen = self._selected(layer, given.index, own, entries, plan)
            seen = entries.seen.clamp(max=own.topk)
            o, _ = ops.sparse_mla(*read, inputs.sink, None, fields[ENTRY], chosen, seen)
            return o
        o, lse = ops.sparse_mla(*read, inputs.sink)
        if not entries.width:
            return o
        every, every_lse = ops.paged_mla(
            q,
            fields[ENTRY],
            entries.page_table,
            plan.batch.row,
            entries.seen,
            spec.scale,
            spec.head_dim,
            width=entries.width,
        )
        merged, _ = ops.merge_state_v2(
            o, torch.logaddexp(lse, inputs.sink), every, every_lse, o, None
        )
        return merged

    def _window(self, batch: Batch, window: int) -> tuple[Tensor, Tensor]:
        size, table = self.pools.schema.page_size, batch.places[self._window_group].page_table
        back = torch.arange(window, device=batch.slot.device)
        slot = (batch.slot.unsqueeze(1) - back).clamp(min=0)
        cells = table[batch.row.unsqueeze(1), slot // size] * size + slot % size
        return cells.int(), (batch.slot + 1).clamp(max=window).int()

    def _entries(self, batch: Batch, rate: int) -> Entries:
        place, size = batch.places[0], self.pools.schema.page_size
        count, apart = entries_of_page(size, rate), max(1, rate // size)
        table = place.page_table
        if apart > 1:
            table = table[:, apart - 1 :: apart].contiguous()
        closing = (batch.slot >= 0) & ((batch.slot + 1) % rate == 0)
        location = place.location // size * count + batch.slot % size // rate
        return Entries(
            size=count,
            page_table=table,
            seen=torch.div(batch.slot + 1, rate, rounding_mode="floor").int(),
            width=(batch.max_slot + 1) // rate,
            location=location.masked_fill(~closing, -1),
        )

    def _store(
        self, layer: int, given: EntryInputs, plan: CompressedPlan, dtype: torch.dtype
    ) -> None:
        """Store the step's inputs of entries, and the entries and index keys, of a dtype, of the
        windows that its tokens close."""
        own, fields = self.layers[layer].compression, self.pools.pages[layer]
        assert own is not None
        kept, location = fields[INPUTS], plan.entries[own.rate].location
        half, wide = given.inputs.shape[1] // 2, 2 * given.compression.bias.shape[1]
        parts = given.inputs[:, :half], given.inputs[:, half:]
        ops.mla_kv_store(*parts, kept, plan.batch.places[self._window_group].location)
        entry = self._made(kept[..., :wide], given.compression, plan, dtype)
        self._store_records(layer, entry, fields[ENTRY], location)
        if given.index_compression is not None and given.index is not None:
            form = self._index[layer]
            key = self._made(kept[..., wide:], given.index_compression, plan, dtype)
            switches = form.preshuffled, form.quantized, form.rotated
            ops.index_k_store(key, fields[INDEX_KEY], location, *switches)

    def _store_records(self, layer: int, lines: Tensor, cache: Tensor, location: Tensor) -> None:
        """Write records or entries [T, D]."""
        at = self.layers[layer].head_dim - self.layers[layer].rotary.head_dim
        ops.mla_kv_store(lines[:, :at], lines[:, at:], cache, location)

    def _made(
        self, inputs: Tensor, by: Compression, plan: CompressedPlan, dtype: torch.dtype
    ) -> Tensor:
        """Entries [T, d] of the windows that tokens close."""
        batch, place = plan.batch, plan.batch.places[self._window_group]
        where = inputs, place.page_table, batch.row, batch.slot
        return ops.compress_windows(*where, by.bias, by.norm, by.eps, by.cos_sin, dtype)

    def _selected(
        self,
        layer: int,
        index: IndexInputs,
        own: CompressionSpec,
        entries: Entries,
        plan: CompressedPlan,
    ) -> Tensor:
        """Cells [T, at most topk] int32 of the entries with the best scores, ascending; what is
        behind them is no cell, or not seen."""
        if entries.width <= own.topk:
            every = torch.arange(entries.width, device=entries.seen.device)
            pages = entries.page_table[plan.batch.row.unsqueeze(1), every // entries.size]
            return (pages * entries.size + every % entries.size).int()
        keys = IndexKeys(
            self.pools.pages[layer][INDEX_KEY],
            self._index[layer],
            entries.page_table,
            entries.size,
            plan.batch.row,
            entries.seen,
            entries.width,
        )
        return select_cells(index, keys, own.topk, plan.cuts.chunked)


def _record(spec: CompressedSpec, form: PageFormat) -> tuple[int, torch.dtype]:
    """Numbers of a record or an entry, and their dtype: as they are, or bytes in which those that
    are not rotated are in float8.

    Raises:
        BadConfig: for a format that does not hold them.
    """
    if form.kv is not None:
        raise BadConfig(
            f"kv_cache_dtype is {form.kv.name}, which is not a format of compressed attention's "
            "records",
            "Use --kv-cache-dtype fp8_ds, or auto",
        )
    if not form.small_records:
        return spec.head_dim, form.dtype
    rope = spec.rotary.head_dim
    plain = spec.head_dim - rope
    if plain % (2 * WHOLE_TILE) != WHOLE_TILE:
        raise BadConfig(
            f"kv_cache_dtype is fp8_ds, which holds an odd number of tiles of {WHOLE_TILE} numbers "
            f"that are not rotated, not {plain} of them",
            "Use --kv-cache-dtype auto",
        )
    return whole_bytes(plain, rope), BYTES


def entries_of_page(size: int, rate: int) -> int:
    """Entries per page of this many slots.

    Raises:
        BadConfig: for pages that windows do not fill, nor pages windows.
    """
    if size % rate and rate % size:
        raise BadConfig(
            f"page_size is {size}, but every {rate} tokens have an entry: one has to be a multiple "
            "of the other",
            f"Use --page-size {rate}" if rate > 16 else "Use --page-size 64",
        )
    return max(1, size // rate)
