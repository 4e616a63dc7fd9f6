"""Keys and values of a step enter the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Alternative, Draw, Point, Points, moved
from cairn.ops.cache import quantized
from cairn.ops.cache.kernels import write_kv_kernel
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT64, check_caches, expect
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

NUMBERS = 1024
"""Of a program, which copies heads of a key and of its value."""


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
    for given, cache in ((k, k_cache), (v, v_cache)):
        for place, values in zip(quantized.parts(cache), quantized.quantize(given), strict=True):
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
    # Line of head 0: every further head lies page_size lines behind.
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
        write_kv_kernel[(tokens * parts,)](
            *(
                call.k,
                call.v,
                call.k_cache,
                call.v_cache,
                call.location,
                call.k.stride(0),
                call.v.stride(0),
            ),
            *(*call.k_cache.stride()[:2], call.k_cache.shape[2], heads, dim, parts, at_once, width),
            num_warps=gpu.warps_for(at_once * width),
        )


@write_kv.cases
def _(make: Make) -> Cases:
    for dtype, page_size, heads in ((torch.float32, 4, 3), (torch.bfloat16, 16, 1)):
        caches = [make.randn(5, heads, page_size, 8, dtype=dtype) for _ in range(2)]
        spot = make.tensor([0, 3, 17, -1, 2 * page_size, 5 * page_size - 1, -7], torch.int64)
        k, v = (make.randn(7, heads, 8, dtype=dtype) for _ in range(2))
        yield make.args(k, v, *caches, spot)
        yield make.args(k[:2], v[:2], *caches, spot[:2])
        yield make.args(k[:0], v[:0], *caches, spot[:0])
        yield make.args(k[3:4], v[3:4], *caches, spot[3:4])
        yield make.args(k, v, *(quantized.pack(cache) for cache in caches), spot)


def _index_put(call: Call) -> None:
    """The definition where every location is written."""
    page, offset = call.location // call.k_cache.shape[2], call.location % call.k_cache.shape[2]
    call.k_cache[page, :, offset] = call.k
    call.v_cache[page, :, offset] = call.v


@write_kv.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, size, dim = layer.kv_heads, layer.page_size, layer.head_dim
        pages = rows // size + 64
        k, v = (draw.randn(rows, heads, dim) for _ in range(2))
        caches = [draw.randn(pages, heads, size, dim) for _ in range(2)]
        spot = draw.rand(pages * size).argsort()[:rows]
        yield Point(
            f"{layer.name}: {rows} x {heads} x {dim}",
            draw.args(k, v, *caches, spot),
            moved(k, k, v, v, spot),
            alternatives=(Alternative("index_put", _index_put), *draw.by_torch(write_kv.reference)),
        )
