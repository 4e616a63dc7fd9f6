"""Top-k selection in rows of scores, as positions or as slots of a cache.

The functions of sgl-kernel's module `top_k` are importable from `cairn.ops.top_k` too.
"""

from cairn.ops.top_k.fast_topk import fast_topk
from cairn.ops.top_k.fast_topk_transform_fused import fast_topk_transform_fused
from cairn.ops.top_k.fast_topk_transform_ragged_fused import fast_topk_transform_ragged_fused
from cairn.ops.top_k.fast_topk_v2 import fast_topk_v2

__all__ = [
    "fast_topk",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
]
