"""Attention over blocks and single columns of keys.

The functions of sgl-kernel's module `sparse_flash_attn` are importable from
`cairn.ops.sparse_flash_attn` too.
"""

from cairn.ops.sparse_flash_attn.convert_vertical_slash_indexes import (
    convert_vertical_slash_indexes,
    convert_vertical_slash_indexes_mergehead,
)
from cairn.ops.sparse_flash_attn.sparse_attn_func import sparse_attn_func, sparse_attn_varlen_func

__all__ = [
    "convert_vertical_slash_indexes",
    "convert_vertical_slash_indexes_mergehead",
    "sparse_attn_func",
    "sparse_attn_varlen_func",
]
