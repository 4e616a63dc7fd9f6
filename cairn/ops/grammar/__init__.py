"""Masks of grammars.

What sgl-kernel has in its module `grammar` is in `cairn.ops.grammar` too.
"""

from cairn.ops.grammar.apply_token_bitmask_inplace_cuda import apply_token_bitmask_inplace_cuda

__all__ = ["apply_token_bitmask_inplace_cuda"]
