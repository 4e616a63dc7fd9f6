"""Concatenation, float8 casts, positions, the Hadamard transform.

Ops of other families that are in sgl-kernel's module `elementwise` are exported here too.
"""

from cairn.ops.activation.gelu_and_mul import gelu_and_mul
from cairn.ops.activation.gelu_quick import gelu_quick
from cairn.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.elementwise.concat_mla import concat_mla_absorb_q, concat_mla_k
from cairn.ops.elementwise.copy_to_gpu_no_ce import copy_to_gpu_no_ce
from cairn.ops.elementwise.fp8 import downcast_fp8
from cairn.ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from cairn.ops.norm.gemma import gemma_fused_add_rmsnorm, gemma_rmsnorm
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.rotary.apply_rope_with_cos_sin_cache_inplace import (
    FusedSetKVBufferArg,
    apply_rope_with_cos_sin_cache_inplace,
)
from cairn.ops.rotary.rotated import rotary_embedding

__all__ = [
    "FusedSetKVBufferArg",
    "apply_rope_with_cos_sin_cache_inplace",
    "concat_mla_absorb_q",
    "concat_mla_k",
    "copy_to_gpu_no_ce",
    "downcast_fp8",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "rmsnorm",
    "rotary_embedding",
    "silu_and_mul",
]
