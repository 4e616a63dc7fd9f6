"""What callers may ask about how ops do their work: what is fused, and what is cut into tiles.

Results of ops do not depend on the answers, their speed does.
"""

from cairn.ops.attention.launch import LANDMARK_LINES, SPLIT_TOKENS, dense_in_tiles, in_tiles
from cairn.ops.compile_ahead import compile_ahead
from cairn.ops.landmark.page_tiles import most_pages as most_pages_in_tiles
from cairn.ops.landmark.page_weights import shared_weights
from cairn.ops.landmark.select_task import candidate_pages, short_pages
from cairn.ops.linear.panel import sums_in_norm as norms_behind_sum
from cairn.ops.plans import is_traced
from cairn.ops.trust import trusted

__all__ = [
    "LANDMARK_LINES",
    "SPLIT_TOKENS",
    "candidate_pages",
    "compile_ahead",
    "dense_in_tiles",
    "in_tiles",
    "is_traced",
    "most_pages_in_tiles",
    "norms_behind_sum",
    "shared_weights",
    "short_pages",
    "trusted",
]
