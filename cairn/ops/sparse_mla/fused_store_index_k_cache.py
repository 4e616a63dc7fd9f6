"""Write of the lightning indexer's keys to a float8 paged cache, under sgl-kernel's name."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache.quantized import BYTES
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, check_min, expect, expect_within
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache, store_launch
from cairn.ops.sparse_mla.index_k_store import index_k_store

NAME = "fused_store_index_k_cache"


@op(mutates=("index_k_with_scale",))
def fused_store_index_k_cache(
    key: Tensor, index_k_with_scale: Tensor, out_cache_loc: Tensor, page_size: int = 64
) -> None:
    """`index_k_store` to a float8 cache in the linear layout, with scales max(|k|, 1e-4) / 448.

    Args:
        key: [T, D] float32, bfloat16 or float16; rows may be strided.
        index_k_with_scale: [pages, page_size * (D + 4)] uint8: per page the e4m3 codes, then the
            float32 scales; changed.
        out_cache_loc: [T] int32 or int64, page * page_size + slot; tokens with a negative one are
            skipped.
        page_size: tokens per page.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) a location beyond the cache.
    """
    index_k_store.reference(key, index_k_with_scale, out_cache_loc.long())


@fused_store_index_k_cache.check
def _(call: Call) -> None:
    check_min(NAME, "page_size", call.page_size, 1)
    expect(NAME, "key", call.key, 2, FLOATS)
    token = call.key.shape[1] + index_cache.SCALE_BYTES
    shape = (None, call.page_size * token)
    cache = call.index_k_with_scale
    expect(NAME, "index_k_with_scale", cache, shape, (BYTES,), call.key, 1)
    expect(NAME, "out_cache_loc", call.out_cache_loc, call.key.shape[:1], INDICES, call.key, -1)
    most = len(cache) * call.page_size
    expect_within(NAME, "out_cache_loc", call.out_cache_loc, most, begin=None)


def _fits(call: Call) -> bool:
    return store_launch.fits_index(call.key, call.index_k_with_scale, call.out_cache_loc)


@fused_store_index_k_cache.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> None:
    layout = (False, False, False)
    store_launch.store_index(call.key, call.index_k_with_scale, call.out_cache_loc, *layout)
