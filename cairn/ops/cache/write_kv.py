"""Write of a step's keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache import quantized
from cairn.ops.cache.kernels import write_kv_kernel
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT64, check_caches, expect
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

NUMBERS = 1024
"""Elements per program, which copies heads of a key and of its value."""


@op(mutates=("k_cache", "v_cache"))
def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, location: Tensor) -> None:
    """Write every token's key and value into its slot.

    Args:
        k, v: [T, h_kv, d], the caches' dtype.
        k_cache, v_cache: [pages, h_kv, S, d], or quantized, changed.
        location: [T] int64, page * S + slot in the page; a negative one is not written.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    page_size = k_cache.shape[2]
    page = torch.div(location, page_size, rounding_mode="floor")
    offset = location - page * page_size
    kept = location >= 0
    if not bool(kept.all()):
        k, v, page, offset = k[kept], v[kept], page[kept], offset[kept]
    if not quantized.is_quantized(k_cache):
        k_cache[page, :, offset] = k
        v_cache[page, :, offset] = v
        return
    form, _ = quantized.form_of(k_cache)
    for given, cache in ((k, k_cache), (v, v_cache)):
        stored = quantized.encode(given, form)
        for place, values in zip(quantized.parts(cache), stored, strict=True):
            place[page, :, offset] = values


@write_kv.check
def _(call: Call) -> None:
    name = "write_kv"
    _, heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.k)
    expect(name, "location", call.location, 1, INT64, call.k, -1)
    kinds = FLOATS if quantized.is_quantized(call.k_cache) else (call.k_cache.dtype,)
    expect(name, "k", call.k, (call.location.shape[0], heads, dim), kinds)
    expect(name, "v", call.v, call.k.shape, (call.k.dtype,), call.k)


@write_kv.implementation(
    "index_copy",
    devices=("cpu",),
    when=lambda call: (
        call.k.dtype == call.k_cache.dtype
        and call.k_cache.is_contiguous()
        and call.v_cache.is_contiguous()
    ),
)
def _(call: Call) -> None:
    k, v, location = call.k, call.v, call.location
    _, heads, page_size, dim = call.k_cache.shape
    if location.numel() == 0:
        return
    if int(location.min()) < 0:
        kept = (location >= 0).nonzero()[:, 0]
        k, v, location = k[kept], v[kept], location[kept]
    page = location // page_size
    # Row of head 0 in the flattened cache; each further head lies page_size rows after it.
    line = page * ((heads - 1) * page_size) + location
    heads_behind = torch.arange(0, heads * page_size, page_size, device=line.device)
    lines = (line.unsqueeze(1) + heads_behind).flatten()
    call.k_cache.view(-1, dim).index_copy_(0, lines, k.reshape(-1, dim))
    call.v_cache.view(-1, dim).index_copy_(0, lines, v.reshape(-1, dim))


@write_kv.implementation(
    "triton",
    devices=gpu.DEVICES,
    replayed=True,
    when=lambda call: (
        call.k.stride()[1:] == call.v.stride()[1:] == (call.k.shape[2], 1)
        and call.k_cache.stride() == call.v_cache.stride()
        and quantized.fits(call.k, call.k_cache)
    ),
)
def _(call: Call) -> None:
    tokens, heads, dim = call.k.shape
    if tokens:
        width = gpu.next_power_of_2(dim)
        at_once = min(gpu.next_power_of_2(heads), max(1, NUMBERS // width))
        parts = -(-heads // at_once)
        warps = gpu.warps_for(at_once * width)
        write_kv_kernel[(tokens * parts,)](
            k=call.k,
            v=call.v,
            k_cache=call.k_cache,
            v_cache=call.v_cache,
            location=call.location,
            k_stride=call.k.stride(0),
            v_stride=call.v.stride(0),
            page_stride=call.k_cache.stride(0),
            head_stride=call.k_cache.stride(1),
            SIZE=call.k_cache.shape[2],
            HEADS=heads,
            DIM=dim,
            PARTS=parts,
            HP=at_once,
            DP=width,
            PDL=uses_pdl(call.k.device, tokens, parts * warps),
            num_warps=warps,
        )
