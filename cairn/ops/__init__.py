"""The op library: public functions whose bodies are their definitions, one file an op.

`cairn.ops.NAME(...)` runs the best implementation for its arguments; `cairn.ops.registry` explains
the choice and lists the ops.
"""

from cairn.ops.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from cairn.ops.activation.gelu_quick import gelu_quick
from cairn.ops.activation.sigmoid_gate_mul import sigmoid_gate_mul
from cairn.ops.activation.silu_and_mul_clamp import silu_and_mul_clamp
from cairn.ops.allreduce import (
    SymmetricAllReduce,
    all_reduce,
    all_reduce_reg,
    all_reduce_unreg,
    allocate_meta_buffer,
    deterministic_all_reduce_reg,
    deterministic_all_reduce_unreg,
    dispose,
    get_graph_buffer_ipc_meta,
    get_meta_buffer_ipc_handle,
    init_custom_ar,
    init_custom_qr,
    meta_size,
    mscclpp_allreduce,
    mscclpp_generate_unique_id,
    mscclpp_init_context,
    qr_all_reduce,
    qr_destroy,
    qr_get_handle,
    qr_max_size,
    qr_open_handles,
    register_buffer,
    register_graph_buffers,
)
from cairn.ops.attention import cutlass_mla_decode, cutlass_mla_get_workspace_size
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.merge_states import merge_state, merge_state_v2
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.cache import decode_slots, resolve_frames, write_kv
from cairn.ops.compress import compress_windows, norm_rope_tail
from cairn.ops.elementwise.concat_mla import concat_mla_absorb_q, concat_mla_k
from cairn.ops.elementwise.copy_to_gpu_no_ce import copy_to_gpu_no_ce
from cairn.ops.elementwise.fp8 import downcast_fp8, fp8_quantize
from cairn.ops.elementwise.hadamard_blocks import (
    hadamard_transform_12n,
    hadamard_transform_20n,
    hadamard_transform_28n,
    hadamard_transform_40n,
)
from cairn.ops.elementwise.hadamard_transform import hadamard_transform
from cairn.ops.elementwise.mla_kv_pack import mla_kv_pack_quantize_fp8
from cairn.ops.elementwise.positions import (
    clamp_position,
    fixup_zero_kv_rows,
    resolve_future_token_ids,
)
from cairn.ops.elementwise.timestep_embedding import timestep_embedding
from cairn.ops.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    is_fa3_supported,
)
from cairn.ops.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    flash_mla_with_kvcache_sm90,
    get_mla_metadata,
)
from cairn.ops.gguf import (
    ggml_dequantize,
    ggml_moe_a8,
    ggml_moe_a8_vec,
    ggml_moe_get_block_size,
    ggml_mul_mat_a8,
    ggml_mul_mat_vec_a8,
)
from cairn.ops.grammar.apply_token_bitmask_inplace_cuda import apply_token_bitmask_inplace_cuda
from cairn.ops.hyper import mhc_head, mhc_post, mhc_pre
from cairn.ops.kvcacheio import (
    ring_read,
    ring_write,
    transfer_kv_all_layer,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_all_layer_lf_ph,
    transfer_kv_all_layer_mla,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_per_layer_mla,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_per_layer_ph_lf,
)
from cairn.ops.landmark.blend_window import blend_window
from cairn.ops.landmark.framed_attention import framed_attention
from cairn.ops.landmark.landmark_attention import landmark_attention
from cairn.ops.landmark.mean_summary import mean_summary
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.page_weights import page_weights
from cairn.ops.landmark.prior_summary import prior_summary
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.landmark.store_prior_summary import store_prior_summary
from cairn.ops.linear.dsv3_gemms import dsv3_fused_a_gemm, dsv3_router_gemm
from cairn.ops.linear.fp8_blockwise_scaled_mm import fp8_blockwise_scaled_mm
from cairn.ops.linear.gated_linear import gated_linear
from cairn.ops.linear.linear import linear
from cairn.ops.linear.linear_add import linear_add
from cairn.ops.linear.linear_add_rmsnorm import linear_add_rmsnorm
from cairn.ops.linear.linear_fp8_blocks import linear_fp8_blocks
from cairn.ops.linear.scaled_mm import bmm_fp8, fp8_scaled_mm, int8_scaled_mm
from cairn.ops.mamba import (
    causal_conv1d_fn_cpu,
    causal_conv1d_fwd,
    causal_conv1d_rows,
    causal_conv1d_update,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_cpu,
    fused_gdn_gating,
    fused_qkvzba_split_reshape_cat,
    fused_qkvzba_split_reshape_cat_contiguous,
    fused_sigmoid_gating_delta_rule_update,
    gated_delta_rule_rows,
    ragged_rows,
)
from cairn.ops.memory import set_kv_buffer_kernel, weak_ref_tensor
from cairn.ops.memory.take_rows import take_rows
from cairn.ops.moe import (
    apply_shuffle_mul_sum,
    biased_grouped_topk,
    fp8_blockwise_scaled_grouped_mm,
    fused_experts,
    grouped_topk,
    grouped_topk_softmax,
    hash_topk,
    kimi_k2_moe_fused_gate,
    moe_align_block_size,
    moe_fused_gate,
    moe_sum,
    moe_sum_reduce,
    prepare_moe_input,
    shuffle_rows,
    topk_sigmoid,
    topk_softmax,
)
from cairn.ops.moe.cutlass_w4a8 import cutlass_w4a8_moe_mm, get_cutlass_w4a8_moe_mm_data
from cairn.ops.moe.expert_specialization import (
    es_fp8_blockwise_scaled_grouped_mm,
    es_sm100_mxfp8_blockscaled_grouped_mm,
    es_sm100_mxfp8_blockscaled_grouped_quant,
)
from cairn.ops.moe.fp4_mm import cutlass_fp4_group_mm, cutlass_scaled_fp4_mm
from cairn.ops.norm.fused_add_layernorm import fused_add_layernorm
from cairn.ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from cairn.ops.norm.fused_inplace_qknorm import fused_inplace_qknorm
from cairn.ops.norm.fused_inplace_qknorm_across_heads import fused_inplace_qknorm_across_heads
from cairn.ops.norm.fused_rmsnorm_gated import fused_rmsnorm_gated
from cairn.ops.norm.gemma import gemma4_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm
from cairn.ops.norm.l2norm import l2norm
from cairn.ops.norm.layernorm import layernorm
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.norm.rmsnorm_add import rmsnorm_add
from cairn.ops.norm.rmsnorm_hf import rmsnorm_hf
from cairn.ops.quantization.per_token_quant_int8 import per_token_quant_int8
from cairn.ops.quantization.scaled_fp4_experts_quant import scaled_fp4_experts_quant
from cairn.ops.quantization.scaled_fp4_grouped_quant import (
    scaled_fp4_grouped_quant,
    silu_and_mul_scaled_fp4_grouped_quant,
)
from cairn.ops.quantization.scaled_fp4_quant import scaled_fp4_quant, suggest_nvfp4_global_scale
from cairn.ops.quantization.sgl_per_tensor_quant_fp8 import sgl_per_tensor_quant_fp8
from cairn.ops.quantization.sgl_per_token_group_quant_8bit import (
    sgl_per_token_group_quant_8bit,
    sgl_per_token_group_quant_fp8,
    sgl_per_token_group_quant_int8,
)
from cairn.ops.quantization.sgl_per_token_quant_fp8 import sgl_per_token_quant_fp8
from cairn.ops.registry import check_forced
from cairn.ops.rotary import head_norm_rope, head_squares, heads_into_cache
from cairn.ops.rotary.apply_rope_with_cos_sin_cache_inplace import (
    FusedSetKVBufferArg,
    apply_rope_with_cos_sin_cache_inplace,
)
from cairn.ops.rotary.fused_qk_norm_rope import fused_qk_norm_rope
from cairn.ops.rotary.rotary_cos_sin import rotary_cos_sin
from cairn.ops.rotary.rotated import rotary_embedding
from cairn.ops.rotary.split_norm_rope import split_norm_rope
from cairn.ops.sampling.apply_logit_bias import apply_logit_bias
from cairn.ops.sampling.apply_penalties import apply_penalties
from cairn.ops.sampling.argmax_tokens import argmax_tokens
from cairn.ops.sampling.counter_uniform import counter_uniform
from cairn.ops.sampling.draw_tokens import draw_tokens
from cairn.ops.sampling.min_p_renorm_probs import min_p_renorm_probs
from cairn.ops.sampling.samplers import (
    min_p_sampling_from_probs,
    sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)
from cairn.ops.sampling.score_tokens import score_tokens
from cairn.ops.sampling.top_k_mask_logits import top_k_mask_logits
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm_prob, top_k_renorm_probs
from cairn.ops.sampling.top_k_top_p_sampling_from_logits import top_k_top_p_sampling_from_logits
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm_prob, top_p_renorm_probs
from cairn.ops.sparse_flash_attn import (
    convert_vertical_slash_indexes,
    convert_vertical_slash_indexes_mergehead,
    sparse_attn_func,
    sparse_attn_varlen_func,
)
from cairn.ops.sparse_mla import (
    fused_store_index_k_cache,
    index_k_gather,
    index_k_store,
    index_q_quantize,
    latent_norm_rope,
    latent_query_rope,
    mla_kv_store,
    paged_mla,
    paged_mqa_logits,
    ragged_mqa_logits,
    select_topk,
    set_mla_kv_buffer,
    sparse_mla,
)
from cairn.ops.spatial import create_greenctx_stream_by_value, get_sm_available
from cairn.ops.speculative import (
    build_tree_kernel_efficient,
    reconstruct_indices_from_tree_mask,
    segment_packbits,
    tree_speculative_sampling_target_only,
    verify_chains,
    verify_tree_greedy,
)
from cairn.ops.top_k import (
    fast_topk,
    fast_topk_transform_fused,
    fast_topk_transform_ragged_fused,
    fast_topk_v2,
)
from cairn.ops.weight_only.awq import awq_dequantize, awq_gemm
from cairn.ops.weight_only.experts_packed import experts_packed
from cairn.ops.weight_only.gptq import gptq_gemm, gptq_shuffle
from cairn.ops.weight_only.linear_packed import dequantize_packed, linear_packed
from cairn.ops.weight_only.marlin import gptq_marlin_gemm, moe_wna16_marlin_gemm
from cairn.ops.weight_only.qserve import qserve_w4a8_per_chn_gemm, qserve_w4a8_per_group_gemm
from cairn.ops.weight_only.repack import (
    awq_marlin_moe_repack,
    awq_marlin_repack,
    gptq_marlin_repack,
)

__all__ = [
    "FusedSetKVBufferArg",
    "SymmetricAllReduce",
    "all_reduce",
    "all_reduce_reg",
    "all_reduce_unreg",
    "allocate_meta_buffer",
    "apply_logit_bias",
    "apply_penalties",
    "apply_rope_with_cos_sin_cache_inplace",
    "apply_shuffle_mul_sum",
    "apply_token_bitmask_inplace_cuda",
    "argmax_tokens",
    "awq_dequantize",
    "awq_gemm",
    "awq_marlin_moe_repack",
    "awq_marlin_repack",
    "biased_grouped_topk",
    "blend_window",
    "bmm_fp8",
    "build_tree_kernel_efficient",
    "causal_conv1d_fn_cpu",
    "causal_conv1d_fwd",
    "causal_conv1d_rows",
    "causal_conv1d_update",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_cpu",
    "clamp_position",
    "compress_windows",
    "concat_mla_absorb_q",
    "concat_mla_k",
    "convert_vertical_slash_indexes",
    "convert_vertical_slash_indexes_mergehead",
    "copy_to_gpu_no_ce",
    "counter_uniform",
    "create_greenctx_stream_by_value",
    "cutlass_fp4_group_mm",
    "cutlass_mla_decode",
    "cutlass_mla_get_workspace_size",
    "cutlass_scaled_fp4_mm",
    "cutlass_w4a8_moe_mm",
    "decode_slots",
    "dense_attention",
    "dequantize_packed",
    "deterministic_all_reduce_reg",
    "deterministic_all_reduce_unreg",
    "dispose",
    "downcast_fp8",
    "draw_tokens",
    "dsv3_fused_a_gemm",
    "dsv3_router_gemm",
    "es_fp8_blockwise_scaled_grouped_mm",
    "es_sm100_mxfp8_blockscaled_grouped_mm",
    "es_sm100_mxfp8_blockscaled_grouped_quant",
    "experts_packed",
    "fast_topk",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
    "fixup_zero_kv_rows",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_sm90",
    "fp8_blockwise_scaled_grouped_mm",
    "fp8_blockwise_scaled_mm",
    "fp8_quantize",
    "fp8_scaled_mm",
    "framed_attention",
    "fused_add_layernorm",
    "fused_add_rmsnorm",
    "fused_experts",
    "fused_gdn_gating",
    "fused_inplace_qknorm",
    "fused_inplace_qknorm_across_heads",
    "fused_qk_norm_rope",
    "fused_qkvzba_split_reshape_cat",
    "fused_qkvzba_split_reshape_cat_contiguous",
    "fused_rmsnorm_gated",
    "fused_sigmoid_gating_delta_rule_update",
    "fused_store_index_k_cache",
    "gated_delta_rule_rows",
    "gated_linear",
    "gelu_and_mul",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "gemma4_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_cutlass_w4a8_moe_mm_data",
    "get_graph_buffer_ipc_meta",
    "get_meta_buffer_ipc_handle",
    "get_mla_metadata",
    "get_scheduler_metadata",
    "get_sm_available",
    "ggml_dequantize",
    "ggml_moe_a8",
    "ggml_moe_a8_vec",
    "ggml_moe_get_block_size",
    "ggml_mul_mat_a8",
    "ggml_mul_mat_vec_a8",
    "gptq_gemm",
    "gptq_marlin_gemm",
    "gptq_marlin_repack",
    "gptq_shuffle",
    "grouped_topk",
    "grouped_topk_softmax",
    "hadamard_transform",
    "hadamard_transform_12n",
    "hadamard_transform_20n",
    "hadamard_transform_28n",
    "hadamard_transform_40n",
    "hash_topk",
    "head_norm_rope",
    "head_squares",
    "heads_into_cache",
    "index_k_gather",
    "index_k_store",
    "index_q_quantize",
    "init_custom_ar",
    "init_custom_qr",
    "int8_scaled_mm",
    "is_fa3_supported",
    "kimi_k2_moe_fused_gate",
    "l2norm",
    "landmark_attention",
    "latent_norm_rope",
    "latent_query_rope",
    "layernorm",
    "linear",
    "linear_add",
    "linear_add_rmsnorm",
    "linear_fp8_blocks",
    "linear_packed",
    "mean_summary",
    "merge_state",
    "merge_state_v2",
    "meta_size",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
    "min_p_renorm_probs",
    "min_p_sampling_from_probs",
    "mla_kv_pack_quantize_fp8",
    "mla_kv_store",
    "moe_align_block_size",
    "moe_fused_gate",
    "moe_sum",
    "moe_sum_reduce",
    "moe_wna16_marlin_gemm",
    "mscclpp_allreduce",
    "mscclpp_generate_unique_id",
    "mscclpp_init_context",
    "norm_rope_tail",
    "page_attention",
    "page_weights",
    "paged_mla",
    "paged_mqa_logits",
    "per_token_quant_int8",
    "prepare_moe_input",
    "prior_summary",
    "qr_all_reduce",
    "qr_destroy",
    "qr_get_handle",
    "qr_max_size",
    "qr_open_handles",
    "qserve_w4a8_per_chn_gemm",
    "qserve_w4a8_per_group_gemm",
    "ragged_mqa_logits",
    "ragged_rows",
    "reconstruct_indices_from_tree_mask",
    "register_buffer",
    "register_graph_buffers",
    "resolve_frames",
    "resolve_future_token_ids",
    "ring_read",
    "ring_write",
    "rmsnorm",
    "rmsnorm_add",
    "rmsnorm_hf",
    "rotary_cos_sin",
    "rotary_embedding",
    "sampling_from_probs",
    "scaled_fp4_experts_quant",
    "scaled_fp4_grouped_quant",
    "scaled_fp4_quant",
    "score_tokens",
    "segment_packbits",
    "select_pages",
    "select_topk",
    "set_kv_buffer_kernel",
    "set_mla_kv_buffer",
    "sgl_per_tensor_quant_fp8",
    "sgl_per_token_group_quant_8bit",
    "sgl_per_token_group_quant_fp8",
    "sgl_per_token_group_quant_int8",
    "sgl_per_token_quant_fp8",
    "shuffle_rows",
    "sigmoid_gate_mul",
    "silu_and_mul",
    "silu_and_mul_clamp",
    "silu_and_mul_scaled_fp4_grouped_quant",
    "sparse_attn_func",
    "sparse_attn_varlen_func",
    "sparse_mla",
    "split_norm_rope",
    "store_prior_summary",
    "suggest_nvfp4_global_scale",
    "take_rows",
    "timestep_embedding",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "topk_sigmoid",
    "topk_softmax",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
    "tree_speculative_sampling_target_only",
    "verify_chains",
    "verify_tree_greedy",
    "weak_ref_tensor",
    "window_attention",
    "write_kv",
]

check_forced()
