"""Keys and values enter caches of one slot a row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.memory.kernels import store_rows_kernel
from cairn.ops.registry import op

BLOCK = 1024
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@op(mutates=("k_cache", "v_cache"))
def set_kv_buffer_kernel(
    k_cache: Tensor, v_cache: Tensor, loc: Tensor, k: Tensor, v: Tensor, fallback: bool = False
) -> None:
    """k_cache[loc] = k and v_cache[loc] = v, byte for byte.

    Args:
        k_cache, v_cache: [slots, ...] any dtype, changed.
        loc: [T] int32 or int64; a negative one is not written, one that comes twice is undefined.
        k, v: [T, ...] of their cache's dtype and row shape, rows of any stride.
        fallback: ignored; other libraries choose their kernel by it.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    kept = (loc >= 0).nonzero()[:, 0]
    slots = loc[kept].long()
    for cache, rows in ((k_cache, k), (v_cache, v)):
        # Bytes: not every dtype of a cache can be indexed.
        words = SAME_SIZE[cache.element_size()]
        cache.view(words).index_copy_(0, slots, rows.view(words)[kept])


@set_kv_buffer_kernel.check
def _(call: Call) -> None:
    name = "set_kv_buffer_kernel"
    expect(name, "loc", call.loc, (None,), INDICES, like=call.k_cache)
    for kind, cache, rows in (("k", call.k_cache, call.k), ("v", call.v_cache, call.v)):
        if cache.dim() < 1 or cache.element_size() not in SAME_SIZE:
            refuse(name, f"{kind}_cache", f"is {cache.dtype} of shape {list(cache.shape)}")
        if cache.device != call.loc.device:
            refuse(name, f"{kind}_cache", f"lies on {cache.device}, loc on {call.loc.device}")
        shape = (call.loc.shape[0], *cache.shape[1:])
        expect(name, kind, rows, shape, (cache.dtype,), like=call.loc)
        expect_within(name, "loc", call.loc, cache.shape[0], None)


def _copied(x: Tensor) -> Tensor:
    """x as numbers that kernels of every device can copy."""
    return x if x.dtype in FLOATS else x.view(SAME_SIZE[x.element_size()])


def _rows(call: Call) -> bool:
    """Whether rows are contiguous and have elements of the same size."""
    near = all(x[:1].is_contiguous() for x in (call.k_cache, call.v_cache, call.k, call.v))
    return near and call.loc.is_contiguous() and call.k.element_size() == call.v.element_size()


@set_kv_buffer_kernel.implementation("triton", devices=gpu.DEVICES, when=_rows, replayed=True)
def _(call: Call) -> None:
    tokens = call.loc.shape[0]
    widths = math.prod(call.k.shape[1:]), math.prod(call.v.shape[1:])
    if not tokens or not max(widths):
        return
    block = min(BLOCK, gpu.next_power_of_2(max(widths)))
    blocks = -(-max(widths) // block)
    store_rows_kernel[(tokens * blocks,)](
        k_cache=_copied(call.k_cache),
        v_cache=_copied(call.v_cache),
        loc=call.loc,
        k=_copied(call.k),
        v=_copied(call.v),
        k_cache_stride=call.k_cache.stride(0),
        v_cache_stride=call.v_cache.stride(0),
        k_stride=call.k.stride(0),
        v_stride=call.v.stride(0),
        k_width=widths[0],
        v_width=widths[1],
        BLOCKS=blocks,
        BLOCK=block,
        num_warps=gpu.warps_for(block),
    )
