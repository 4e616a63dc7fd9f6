"""Masks of grammars.

The functions of sgl-kernel's module `grammar` are importable from `cairn.ops.grammar` too.
"""

from cairn.ops.grammar.apply_token_bitmask_inplace_cuda import apply_token_bitmask_inplace_cuda

__all__ = ["apply_token_bitmask_inplace_cuda"]
