"""Attention over the paged cache.

The functions of sgl-kernel's module `attention` are importable from `cairn.ops.attention` too.
"""

from cairn.ops.attention.cutlass_mla_decode import cutlass_mla_decode
from cairn.ops.attention.cutlass_mla_get_workspace_size import cutlass_mla_get_workspace_size
from cairn.ops.attention.merge_states import merge_state, merge_state_v2

__all__ = [
    "cutlass_mla_decode",
    "cutlass_mla_get_workspace_size",
    "merge_state",
    "merge_state_v2",
]
