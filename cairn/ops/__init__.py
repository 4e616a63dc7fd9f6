"""The op library: public functions whose bodies are their definitions, one file an op.

`cairn.ops.NAME(...)` runs the best implementation for its arguments; `cairn.ops.registry` explains
the choice and lists the ops.
"""

from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.merge_state_v2 import merge_state_v2
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.cache.write_kv import write_kv
from cairn.ops.landmark.blend_window import blend_window
from cairn.ops.landmark.landmark_attention import landmark_attention
from cairn.ops.landmark.mean_summary import mean_summary
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.page_weights import page_weights
from cairn.ops.landmark.prior_summary import prior_summary
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.landmark.store_prior_summary import store_prior_summary
from cairn.ops.linear.gated_linear import gated_linear
from cairn.ops.linear.linear import linear
from cairn.ops.linear.linear_add import linear_add
from cairn.ops.linear.packed import packed_linear
from cairn.ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.registry import check_forced
from cairn.ops.rotary.head_norm_rope import head_norm_rope
from cairn.ops.rotary.heads_into_cache import heads_into_cache
from cairn.ops.rotary.rotary_cos_sin import rotary_cos_sin
from cairn.ops.rotary.rotary_embedding import rotary_embedding
from cairn.ops.rotary.split_norm_rope import split_norm_rope
from cairn.ops.sampling.apply_logit_bias import apply_logit_bias
from cairn.ops.sampling.apply_penalties import apply_penalties
from cairn.ops.sampling.apply_token_bitmask import apply_token_bitmask
from cairn.ops.sampling.argmax_tokens import argmax_tokens
from cairn.ops.sampling.counter_uniform import counter_uniform
from cairn.ops.sampling.draw_tokens import draw_tokens
from cairn.ops.sampling.min_p_renorm_probs import min_p_renorm_probs
from cairn.ops.sampling.sampling_from_probs import sampling_from_probs
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm_probs
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm_probs
from cairn.ops.training.sequence_attention import sequence_attention

__all__ = [
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_bitmask",
    "argmax_tokens",
    "blend_window",
    "counter_uniform",
    "dense_attention",
    "draw_tokens",
    "fused_add_rmsnorm",
    "gated_linear",
    "head_norm_rope",
    "heads_into_cache",
    "landmark_attention",
    "linear",
    "linear_add",
    "mean_summary",
    "merge_state_v2",
    "min_p_renorm_probs",
    "packed_linear",
    "page_attention",
    "page_weights",
    "prior_summary",
    "rmsnorm",
    "rotary_cos_sin",
    "rotary_embedding",
    "sampling_from_probs",
    "select_pages",
    "sequence_attention",
    "silu_and_mul",
    "split_norm_rope",
    "store_prior_summary",
    "top_k_renorm_probs",
    "top_p_renorm_probs",
    "window_attention",
    "write_kv",
]

check_forced()
