"""Mixtures of experts: routing, sorting of tokens by expert, grouped products, and the weighted
sum.

A (token, expert) pair is an entry of `topk_ids` [T, k]: pair t * k + j is token t with its j-th
expert. The functions of sgl-kernel's module `moe` are importable from `cairn.ops.moe` too.
"""

from cairn.ops.moe.apply_shuffle_mul_sum import apply_shuffle_mul_sum
from cairn.ops.moe.fp8_blockwise_scaled_grouped_mm import fp8_blockwise_scaled_grouped_mm
from cairn.ops.moe.fused_experts import fused_experts
from cairn.ops.moe.grouped_topk import biased_grouped_topk, grouped_topk, grouped_topk_softmax
from cairn.ops.moe.hash_topk import hash_topk
from cairn.ops.moe.kimi_k2_moe_fused_gate import kimi_k2_moe_fused_gate
from cairn.ops.moe.moe_align_block_size import moe_align_block_size
from cairn.ops.moe.moe_fused_gate import moe_fused_gate
from cairn.ops.moe.moe_sum import moe_sum, moe_sum_reduce
from cairn.ops.moe.prepare_moe_input import prepare_moe_input
from cairn.ops.moe.shuffle_rows import shuffle_rows
from cairn.ops.moe.topk_sigmoid import topk_sigmoid
from cairn.ops.moe.topk_softmax import topk_softmax

__all__ = [
    "apply_shuffle_mul_sum",
    "biased_grouped_topk",
    "fp8_blockwise_scaled_grouped_mm",
    "fused_experts",
    "grouped_topk",
    "grouped_topk_softmax",
    "hash_topk",
    "kimi_k2_moe_fused_gate",
    "moe_align_block_size",
    "moe_fused_gate",
    "moe_sum",
    "moe_sum_reduce",
    "prepare_moe_input",
    "shuffle_rows",
    "topk_sigmoid",
    "topk_softmax",
]
