"""Small steps between the large ones: joins, casts, positions, the Hadamard transform.

What sgl-kernel has of these in its module `elementwise` is in `cairn.ops.elementwise` too.
"""

from cairn.ops.elementwise.concat_mla import concat_mla_absorb_q, concat_mla_k
from cairn.ops.elementwise.copy_to_gpu_no_ce import copy_to_gpu_no_ce
from cairn.ops.elementwise.fp8 import downcast_fp8

__all__ = ["concat_mla_absorb_q", "concat_mla_k", "copy_to_gpu_no_ce", "downcast_fp8"]
