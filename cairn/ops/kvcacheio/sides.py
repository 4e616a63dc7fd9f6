"""Checks and copies shared by the public transfers, between a source and a destination side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops.checks import expect, expect_within, on_host, refuse
from cairn.ops.graph_break import with_graph_break
from cairn.ops.kvcacheio.copy_slots import TABLE, WORD, copy_slots
from cairn.ops.kvcacheio.layout import Layout


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a copy.

    Attributes:
        buffers: the keys', and the values' if there are any, by the names of the arguments.
        layout: of all of them.
        tables: the buffers are tables of addresses, one of each layer.
        every: a buffer holds all layers, not one.
    """

    buffers: dict[str, Tensor]
    layout: Layout
    tables: bool = False
    every: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """What is copied: `count` layers from the first one on, `size` bytes a token in each."""

    size: int
    count: int = 1
    first: int = 0


def copy(
    name: str, src: Side, dst: Side, src_indices: Tensor, dst_indices: Tensor, items: Items
) -> None:
    """Check the arguments of the function of this name, then copy. Raises BadArgument."""
    expect(name, "src_indices", src_indices, (None,), (torch.int64,), dense=-1)
    tokens = src_indices.shape
    expect(name, "dst_indices", dst_indices, tokens, (torch.int64,), src_indices, dense=-1)
    if items.size < WORD or items.size % WORD:
        refuse(name, "item_size", f"is {items.size} bytes, not a multiple of {WORD}")
    if items.first < 0:
        refuse(name, "layer_id", f"is {items.first}")
    if items.count < 1:
        refuse(name, "num_layers", f"is {items.count}")
    for what, side in (("src", src), ("dst", dst)):
        _expect_layout(name, what, side.layout, items.size)
        for argument, buffer in side.buffers.items():
            if side.tables:
                _expect_table(name, argument, buffer, items, src_indices)
            else:
                _expect_buffer(name, argument, buffer, side, items)
                if tokens[0] and not buffer.nbytes:
                    refuse(name, argument, f"has no slots, {tokens[0]} tokens are to be copied")
    _expect_slots(name, src, dst, src_indices, dst_indices)
    (src_k, *src_v), (dst_k, *dst_v) = src.buffers.values(), dst.buffers.values()
    values = (src_v[0], dst_v[0]) if src_v and dst_v else (None, None)
    args: tuple[Any, ...] = (
        *(src_indices, dst_indices, src_k, dst_k, *values),
        *(items.size, items.count, items.first, list(src.layout), list(dst.layout)),
    )
    if src.tables or dst.tables:
        with_graph_break(copy_slots, *args)
    else:
        copy_slots(*args)


def _expect_slots(
    name: str, src: Side, dst: Side, src_indices: Tensor, dst_indices: Tensor
) -> None:
    """Check slots on the host. Skipped tokens may have any slot; with tables of addresses the
    buffers' lengths are unknown."""
    if not on_host(src_indices):
        return
    for what, side, indices in (("src", src, src_indices), ("dst", dst, dst_indices)):
        slots = min(buffer.nbytes for buffer in side.buffers.values()) // side.layout.dim
        if not side.tables and int(indices.max()) >= slots:
            there = (src_indices >= 0) & (dst_indices >= 0)
            expect_within(name, f"{what}_indices", indices[there], slots)


def _expect_layout(name: str, side: str, layout: Layout, item: int) -> None:
    if layout.dim < item or layout.dim % item:
        refuse(name, f"{side}_layout_dim", f"is {layout.dim}, not a multiple of item_size {item}")
    if layout.page_size < 1:
        refuse(name, "page_size", f"is {layout.page_size}")
    if layout.heads < 1 or item % layout.heads:
        refuse(name, "head_num", f"is {layout.heads}: it must divide item_size {item}")


def _expect_table(name: str, argument: str, table: Tensor, items: Items, indices: Tensor) -> None:
    expect(name, argument, table, (None,), (TABLE,), like=indices, dense=-1)
    if table.shape[0] != items.count:
        refuse(name, argument, f"has {table.shape[0]} addresses, not {items.count}")


def _expect_buffer(name: str, argument: str, buffer: Tensor, side: Side, items: Items) -> None:
    expect(name, argument, buffer, dense=-1)
    if buffer.device.type not in ("cpu", "cuda"):
        refuse(name, argument, f"lies on {buffer.device}")
    page, layers = side.layout.page_size * side.layout.dim, side.layout.layers(items.size)
    if buffer.nbytes % page:
        refuse(name, argument, f"has {buffer.nbytes} bytes, not a multiple of {page}")
    if side.every and items.first + items.count > layers:
        refuse(name, argument, f"holds {layers} layers, not {items.first + items.count}")
