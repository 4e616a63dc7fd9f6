"""Kernel of the cache write."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def write_kv_kernel(
    k, v, k_cache, v_cache, location,
    k_stride, v_stride, page_stride, head_stride, size,
    HEADS: tl.constexpr, DIM: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store one token's key and value heads in its slot; a negative location is not written."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(location + token)
    if at >= 0:
        head = tl.arange(0, HP)
        d = tl.arange(0, DP)
        inside = (head < HEADS)[:, None] & (d < DIM)[None, :]
        read = head[:, None] * DIM + d[None, :]
        write = (at // size) * page_stride + (at % size) * DIM
        write = write + head[:, None].to(tl.int64) * head_stride + d[None, :]
        tl.store(k_cache + write, tl.load(k + token * k_stride + read, mask=inside), mask=inside)
        tl.store(v_cache + write, tl.load(v + token * v_stride + read, mask=inside), mask=inside)
