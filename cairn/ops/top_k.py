"""What sgl-kernel has in its module `top_k`; here it is of the family `topk`."""

from cairn.ops.topk.fast_topk import fast_topk
from cairn.ops.topk.fast_topk_transform_fused import fast_topk_transform_fused
from cairn.ops.topk.fast_topk_transform_ragged_fused import fast_topk_transform_ragged_fused
from cairn.ops.topk.fast_topk_v2 import fast_topk_v2

__all__ = [
    "fast_topk",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
]
