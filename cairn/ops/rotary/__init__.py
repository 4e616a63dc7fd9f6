"""Rotary position embedding."""

from cairn.ops.rotary.head_norm_rope import head_norm_rope
from cairn.ops.rotary.head_squares import head_squares
from cairn.ops.rotary.heads_into_cache import heads_into_cache

__all__ = ["head_norm_rope", "head_squares", "heads_into_cache"]
