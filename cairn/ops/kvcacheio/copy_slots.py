"""The op that all kernel-based transfers of keys and values call."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.kvcacheio.kernels import copy_kernel
from cairn.ops.kvcacheio.layout import Layout
from cairn.ops.memory.addresses import tensor_at
from cairn.ops.registry import op

WORD = 8
TABLE = torch.uint64
TILE = 1024
"""Words that a program copies per iteration."""
WIDEST = 512


@op(mutates=("dst_k", "dst_v"))
def copy_slots(
    src_indices: Tensor,
    dst_indices: Tensor,
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor | None,
    dst_v: Tensor | None,
    item_size: int,
    layers: int,
    layer_id: int,
    src_layout: list[int],
    dst_layout: list[int],
) -> None:
    """Copy the items of tokens src_indices[i] to dst_indices[i], byte for byte.

    The copy runs on the device of the indices. There a kernel reads and writes buffers on the host
    too, if their memory is pinned; else torch moves them.

    Args:
        src_indices, dst_indices: [T] int64. A token with a negative index is padding and is
            skipped.
        src_k, dst_k, src_v, dst_v: buffers of keys and values of any dtype, contiguous; or, for
            layers in buffers of their own, tables [>= layers] uint64 of their addresses. Without
            values: None.
        item_size: bytes that a token has in a layer, a multiple of 8.
        layers, layer_id: how many layers, and the first.
        src_layout, dst_layout: dim, page_size and heads of `cairn.ops.kvcacheio.layout.Layout`.
    """
    pairs = [(src_k, dst_k)]
    if src_v is not None and dst_v is not None:
        pairs.append((src_v, dst_v))
    own, other = Layout(*src_layout), Layout(*dst_layout)
    there = (src_indices >= 0) & (dst_indices >= 0)
    src_indices, dst_indices = src_indices[there], dst_indices[there]
    for layer in range(layer_id, layer_id + layers):
        for source, target in pairs:
            source = _buffer(source, layer, own, src_indices)
            target = _buffer(target, layer, other, dst_indices)
            view = own.view(source, item_size)
            read, write = src_indices.to(source.device), dst_indices.to(target.device)
            items = view[read // own.page_size, :, read % own.page_size, layer % view.shape[3]]
            view = other.view(target, item_size)
            at = (write // other.page_size, slice(None), write % other.page_size)
            items = items.reshape(-1, other.heads, item_size // other.heads)
            view[(*at, layer % view.shape[3])] = items.to(target.device)


def _buffer(given: Tensor, layer: int, layout: Layout, indices: Tensor) -> Tensor:
    """A buffer; or, from a table of addresses, the part of the layer's buffer that the indices
    reach."""
    if given.dtype != TABLE:
        return given
    slots = int(indices.max()) + 1 if indices.numel() else 0
    pages = -(-slots // layout.page_size)
    shape = (pages * layout.page_size * layout.dim,)
    # Indexing uint64 is not implemented everywhere.
    address = int(given.view(torch.int64)[layer]) & ((1 << 64) - 1)
    return tensor_at(address, indices.device, torch.uint8, shape)


def _words(call: Call) -> bool:
    """Runs of whole 8-byte words, in memory that a kernel can access."""
    own, other = Layout(*call.src_layout), Layout(*call.dst_layout)
    runs = max(own.heads, other.heads)
    whole = call.item_size % (WORD * runs) == 0 and {own.heads, other.heads} <= {1, runs}
    return whole and all(
        _reached(x, call.src_indices) for x in (call.src_k, call.dst_k, call.src_v, call.dst_v)
    )


def _reached(buffer: Tensor | None, indices: Tensor) -> bool:
    if buffer is None:
        return True
    if buffer.data_ptr() % WORD:
        return False
    return buffer.device == indices.device or (not buffer.is_cuda and buffer.is_pinned())


def _steps(side: str, layout: Layout, item: int, run: int) -> dict[str, int]:
    """A side's arguments of `copy_kernel`, in words."""
    steps = zip(("page", "slot", "layer", "run"), layout.steps(item, run), strict=True)
    own = {f"{side}_{name}": step // WORD for name, step in steps}
    return {f"{side}_size": layout.page_size, **own}


@copy_slots.implementation("triton", devices=gpu.DEVICES, when=_words, replayed=True)
def _(call: Call) -> None:
    own, other = Layout(*call.src_layout), Layout(*call.dst_layout)
    runs = max(own.heads, other.heads)
    run = call.item_size // runs
    lines, words = call.src_indices.shape[0] * runs, run // WORD
    if not lines:
        return
    block = min(WIDEST, gpu.next_power_of_2(words))
    rows = max(1, TILE // block)
    copy_kernel[(-(-lines // rows), call.layers, 1 if call.src_v is None else 2)](
        src_k=call.src_k,
        dst_k=call.dst_k,
        src_v=call.src_v,
        dst_v=call.dst_v,
        src_indices=call.src_indices,
        dst_indices=call.dst_indices,
        lines=lines,
        runs=runs,
        words=words,
        first_layer=call.layer_id,
        **_steps("src", own, call.item_size, run),
        **_steps("dst", other, call.item_size, run),
        SRC_TABLE=call.src_k.dtype == TABLE,
        DST_TABLE=call.dst_k.dtype == TABLE,
        T=rows,
        WP=block,
        num_warps=4,
    )
