"""Modules export the functions of the corresponding modules of sgl-kernel and FlashInfer."""

from __future__ import annotations

from importlib import import_module

import pytest

from cairn import ops

NORMS = {"rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm"}
GATES = {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"}
ROTARY = {"apply_rope_with_cos_sin_cache_inplace", "rotary_embedding", "FusedSetKVBufferArg"}
JOINS = {"concat_mla_k", "concat_mla_absorb_q", "copy_to_gpu_no_ce", "downcast_fp8"}
TRANSFERS = {
    *("transfer_kv_per_layer", "transfer_kv_per_layer_mla", "transfer_kv_all_layer"),
    *("transfer_kv_all_layer_mla", "transfer_kv_direct"),
}
MODULES = {
    "activation": GATES,
    "attention": {"merge_state", "merge_state_v2", "cutlass_mla_decode"},
    "elementwise": NORMS | GATES | ROTARY | JOINS,
    "flash_attn": {"flash_attn_with_kvcache", "flash_attn_varlen_func"},
    "flash_mla": {"get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd"},
    "kvcacheio": TRANSFERS,
    "mamba": {"causal_conv1d_fwd", "causal_conv1d_update", "chunk_gated_delta_rule"},
    "memory": {"set_kv_buffer_kernel", "weak_ref_tensor"},
    "moe": {"topk_softmax", "moe_fused_gate", "moe_align_block_size", "prepare_moe_input"},
    "norm": NORMS,
    "sampling": {"top_k_renorm_probs", "top_p_renorm_probs", "top_k_mask_logits"},
    "sparse_flash_attn": {"convert_vertical_slash_indexes", "sparse_attn_func"},
    "speculative": {"verify_tree_greedy", "segment_packbits"},
    "top_k": {"fast_topk_v2", "fast_topk_transform_fused"},
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_the_functions(name: str) -> None:
    module = import_module(f"cairn.ops.{name}")
    assert set(module.__all__) >= MODULES[name]
    for function in module.__all__:
        assert getattr(module, function) is getattr(ops, function), function
