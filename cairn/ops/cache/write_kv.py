"""Keys and values of a step enter the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache.kernels import write_kv_kernel
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op(mutates=("k_cache", "v_cache"))
def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, location: Tensor) -> None:
    """Write every token's key and value into its slot.

    Args:
        k, v: [T, h_kv, d], the caches' dtype.
        k_cache, v_cache: [pages, h_kv, S, d], changed.
        location: [T] int64, page * S + slot in the page; a negative one is not written.
    """
    page_size = k_cache.shape[2]
    page = torch.div(location, page_size, rounding_mode="floor")
    offset = location - page * page_size
    kept = location >= 0
    if not bool(kept.all()):
        k, v, page, offset = k[kept], v[kept], page[kept], offset[kept]
    k_cache[page, :, offset] = k
    v_cache[page, :, offset] = v


@write_kv.implementation(
    "index_copy",
    devices=("cpu",),
    when=lambda k, v, k_cache, v_cache, location: (
        k_cache.is_contiguous() and v_cache.is_contiguous()
    ),
)
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, location: Tensor) -> None:
    _, heads, page_size, dim = k_cache.shape
    if location.numel() == 0:
        return
    if int(location.min()) < 0:
        kept = (location >= 0).nonzero()[:, 0]
        k, v, location = k[kept], v[kept], location[kept]
    page = location // page_size
    # Line of head 0: every further head lies page_size lines behind.
    line = page * ((heads - 1) * page_size) + location
    lines = (line.unsqueeze(1) + torch.arange(0, heads * page_size, page_size)).flatten()
    k_cache.view(-1, dim).index_copy_(0, lines, k.reshape(-1, dim))
    v_cache.view(-1, dim).index_copy_(0, lines, v.reshape(-1, dim))


@write_kv.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda k, v, k_cache, v_cache, location: (
        k.stride()[1:] == v.stride()[1:] == (k.shape[2], 1)
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride()[2:] == (k.shape[2], 1)
    ),
)
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, location: Tensor) -> None:
    tokens, heads, dim = k.shape
    if tokens:
        write_kv_kernel[(tokens,)](
            *(k, v, k_cache, v_cache, location, k.stride(0), v.stride(0)),
            *(*k_cache.stride()[:2], k_cache.shape[2], heads, dim),
            *(gpu.next_power_of_2(heads), gpu.next_power_of_2(dim)),
            num_warps=4 if heads * dim >= 512 else 1,
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
