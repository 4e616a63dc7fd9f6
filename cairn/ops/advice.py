"""Questions of callers about implementations: what is fused, and what is computed in tiles.

The answers affect the speed of ops, not their results.
"""

from cairn.ops.attention.launch import LANDMARK_LINES, SPLIT_TOKENS, dense_in_tiles, in_tiles
from cairn.ops.compile_ahead import compile_ahead
from cairn.ops.landmark.page_weights import shared_weights
from cairn.ops.landmark.select_task import candidate_pages, short_pages
from cairn.ops.launch_cache.plans import is_traced
from cairn.ops.linear.scaled_launch import multiplies_codes
from cairn.ops.linear.skinny_gemm_panel import sums_in_norm as norms_behind_sum
from cairn.ops.moe.experts_launch import multiplies_fp8
from cairn.ops.norm.launch import norms_sums
from cairn.ops.notes import note_of
from cairn.ops.unchecked import unchecked

__all__ = [
    "LANDMARK_LINES",
    "SPLIT_TOKENS",
    "candidate_pages",
    "compile_ahead",
    "dense_in_tiles",
    "in_tiles",
    "is_traced",
    "multiplies_codes",
    "multiplies_fp8",
    "norms_behind_sum",
    "norms_sums",
    "note_of",
    "shared_weights",
    "short_pages",
    "unchecked",
]
