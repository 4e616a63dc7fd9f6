"""Functions and constants of ops that callers plan their calls with.

They tell which calls are fused into one launch and which run in tiles. They affect the speed of
ops, not their results.
"""

from cairn.ops.attention.launch import LANDMARK_LINES, SPLIT_TOKENS, dense_in_tiles, in_tiles
from cairn.ops.landmark.page_weights import shared_weights
from cairn.ops.landmark.select_launch import most_pages
from cairn.ops.landmark.select_task import candidate_pages, short_pages
from cairn.ops.launch_cache.plans import is_traced
from cairn.ops.linear.scaled_launch import supports_8bit_gemm
from cairn.ops.linear.skinny_gemm_panel import linear_fuses_norm
from cairn.ops.moe.experts_launch import supports_fp8_experts
from cairn.ops.norm.launch import fuses_add_norm

__all__ = [
    "LANDMARK_LINES",
    "SPLIT_TOKENS",
    "candidate_pages",
    "dense_in_tiles",
    "fuses_add_norm",
    "in_tiles",
    "is_traced",
    "linear_fuses_norm",
    "most_pages",
    "shared_weights",
    "short_pages",
    "supports_8bit_gemm",
    "supports_fp8_experts",
]
