"""Normalisation of rows.

They are importable from `cairn.ops.norm` too, as from FlashInfer's module `norm`.
"""

from cairn.ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from cairn.ops.norm.gemma import gemma_fused_add_rmsnorm, gemma_rmsnorm
from cairn.ops.norm.rmsnorm import rmsnorm

__all__ = ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "rmsnorm"]
