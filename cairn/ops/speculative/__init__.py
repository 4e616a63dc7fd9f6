"""Speculative decoding: trees of drafted tokens, built, verified and packed.

The functions of sgl-kernel's module `speculative` are importable from `cairn.ops.speculative` too.
"""

from cairn.ops.speculative.build_tree_kernel_efficient import build_tree_kernel_efficient
from cairn.ops.speculative.reconstruct_indices_from_tree_mask import (
    reconstruct_indices_from_tree_mask,
)
from cairn.ops.speculative.segment_packbits import segment_packbits
from cairn.ops.speculative.tree_speculative_sampling_target_only import (
    tree_speculative_sampling_target_only,
)
from cairn.ops.speculative.verify_chains import verify_chains
from cairn.ops.speculative.verify_tree_greedy import verify_tree_greedy

__all__ = [
    "build_tree_kernel_efficient",
    "reconstruct_indices_from_tree_mask",
    "segment_packbits",
    "tree_speculative_sampling_target_only",
    "verify_chains",
    "verify_tree_greedy",
]
