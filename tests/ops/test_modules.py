"""Families that have what modules of other libraries have, by the same names."""

from __future__ import annotations

from importlib import import_module

import pytest

from cairn import ops

NORMS = {"rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm"}
GATES = {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"}
ROTARY = {"apply_rope_with_cos_sin_cache_inplace", "rotary_embedding", "FusedSetKVBufferArg"}
JOINS = {"concat_mla_k", "concat_mla_absorb_q", "copy_to_gpu_no_ce", "downcast_fp8"}
MODULES = {
    "activation": GATES,
    "attention": {"merge_state", "merge_state_v2", "cutlass_mla_decode"},
    "elementwise": NORMS | GATES | ROTARY | JOINS,
    "memory": {"set_kv_buffer_kernel", "weak_ref_tensor"},
    "norm": NORMS,
    "sampling": {"top_k_renorm_probs", "top_p_renorm_probs", "top_k_mask_logits"},
    "speculative": {"verify_tree_greedy", "segment_packbits"},
}


@pytest.mark.parametrize("family", MODULES)
def test_a_family_has_the_functions_not_their_modules(family: str) -> None:
    module = import_module(f"cairn.ops.{family}")
    assert set(module.__all__) >= MODULES[family]
    for name in module.__all__:
        assert getattr(module, name) is getattr(ops, name), name
