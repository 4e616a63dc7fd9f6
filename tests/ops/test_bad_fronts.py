"""Fronts raise BadArgument, with the argument's name, for arguments of wrong types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.registry import all_ops
from cairn.ops.weight_only.scalar_type import UINT4B8

ODD = ("x", [1], (1, "a"), {}, object(), -3, 1.5, math.nan, torch.zeros(3, 3, 3), torch.zeros(0))


def random(*shape: int) -> Tensor:
    return torch.rand(shape)


def words(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def copied(sides: str, layers: int = 0, **others: Any) -> dict[str, Any]:
    """Arguments of a transfer of the slots 0 to 3; with layers, buffers whose names say so are
    tables of them."""
    slots = {f"{side}_indices": torch.arange(4) for side in ("src", "dst")}
    buffers = {name: random(32, max(1, layers), 2, 16) for name in sides.split()}
    for name in (name for name in buffers if name.endswith("layers")):
        buffers[name] = torch.tensor([x.data_ptr() for x in BUFFERS], dtype=torch.uint64)
    return {**buffers, **slots, "item_size": 128, **others}


BUFFERS = [random(32, 2, 16) for _ in range(2)]


def transfers() -> dict[str, dict[str, Any]]:
    """A valid call of every transfer."""
    alone = {name: random(32, 2, 16) for name in ("dst_k", "dst_v")}
    paged, every = {"src_layout_dim": 256, "layer_id": 1}, {"dst_layout_dim": 256, "num_layers": 2}
    tables = "src_k_layers dst_k_layers src_v_layers dst_v_layers"
    halves = "src_k_layers dst_k src_v_layers dst_v"
    return {
        "transfer_kv_per_layer": copied("src_k dst_k src_v dst_v"),
        "transfer_kv_per_layer_mla": copied("src dst"),
        "transfer_kv_per_layer_pf_lf": {**copied("src_k src_v", 2), **alone, **paged},
        "transfer_kv_per_layer_mla_pf_lf": {**copied("src", 2), "dst": random(32, 2, 16), **paged},
        "transfer_kv_per_layer_ph_lf": {
            **copied("src_k src_v", 2),
            **alone,
            **paged,
            "page_size": 4,
            "head_num": 2,
        },
        "transfer_kv_all_layer": {**copied(tables), "num_layers": 2},
        "transfer_kv_all_layer_mla": {**copied("src_layers dst_layers"), "num_layers": 2},
        "transfer_kv_all_layer_lf_pf": {**copied(halves, 2), **every},
        "transfer_kv_all_layer_mla_lf_pf": {**copied("src_layers dst", 2), **every},
        "transfer_kv_all_layer_lf_ph": {
            **copied(halves, 2),
            **every,
            "page_size": 4,
            "head_num": 2,
        },
        "transfer_kv_direct": {
            "src_layers": BUFFERS,
            "dst_layers": [random(32, 2, 16) for _ in range(2)],
            "src_indices": torch.arange(4),
            "dst_indices": torch.arange(4),
            "page_size": 4,
        },
    }


def latent_calls() -> dict[str, dict[str, Any]]:
    """Of every front of latent attention and its indexer a call that it takes."""
    scores = {"q": random(3, 2, 16), "weights": random(3, 2), "width": None}
    seen = {"row": torch.tensor([0, 1, 0]), "context": words(9, 5, 0), "least": 0}
    table = {"page_table": words(*range(8)).view(2, 4), "chunked": False, "preshuffled": False}
    latents = {"q": random(2, 1, 4, 16), "k_cache": random(8, 4, 1, 16), "head_dim_v": 12}
    latents |= {"block_table": words(*range(8)).view(2, 4), "cache_seqlens": words(9, 5)}
    latents |= {"tile_scheduler_metadata": None, "num_splits": None, "softmax_scale": None}
    latents |= {"descale_q": None, "descale_k": None, "is_fp8_kvcache": False}
    latents |= {"causal": False, "indices": words(*range(6)).view(2, 1, 3)}
    return {
        "mla_kv_pack_quantize_fp8": {
            "k_nope": random(3, 2, 12),
            "k_pe": random(3, 1, 4),
            "v": random(3, 2, 10),
            "k_scale_inv": 2.0,
            "v_scale_inv": 0.5,
            "k_out": random(3, 2, 16).to(torch.float8_e4m3fn),
            "v_out": random(3, 2, 10).to(torch.float8_e4m3fn),
        },
        "flash_mla_with_kvcache": latents,
        "flash_mla_with_kvcache_sm90": latents,
        "paged_mqa_logits": {**scores, **seen, **table, "cache": random(8, 4, 16)},
        "ragged_mqa_logits": {
            **scores,
            "k": random(20, 16),
            "scale": None,
            "start": words(0, 7, 9),
            "end": words(3, 20, 0),
        },
    }


def calls() -> dict[str, dict[str, Any]]:
    """A valid call of every other front."""
    probs, top = random(4, 50), {"top_k": 3, "top_p": 0.9}
    v, s = random(8, 4, 16), random(8, 4)
    states = {"v_a": v, "s_a": s, "v_b": v, "s_b": s, "v_merged": None, "s_merged": None}
    cache, new = random(8, 4, 2, 16), random(2, 1, 2, 16)
    how = {"softmax_scale": None, "causal": True, "window_size": (-1, -1), "softcap": 0.0}
    pages = {"cache_seqlens": words(9, 5), "page_table": words(*range(8)).view(2, 4)}
    steps = {"k": new, "v": new, "attention_chunk": None, "out": None, "cache_leftpad": None}
    ragged = {"k": random(10, 2, 16), "v": random(10, 2, 16), "max_seqlen_q": 6, "max_seqlen_k": 6}
    ends = {"cu_seqlens_q": words(0, 4, 10), "cu_seqlens_k": words(0, 4, 10)}
    turned = {"query": random(8, 64), "key": random(8, 32), "cos_sin_cache": random(64, 16)}
    turned |= {"positions": torch.arange(8), "head_size": 16, "is_neox": True}
    q, lists = random(1, 64, 2, 16), {}
    for name, shape in (("block", (1, 2, 1, 3)), ("column", (1, 2, 1, 4))):
        lists[f"{name}_count"] = torch.zeros(shape[:3], dtype=torch.int32)
        rest = "offset" if name == "block" else "index"
        lists[f"{name}_{rest}"] = torch.zeros(shape, dtype=torch.int32)
    delta = {"q": random(1, 5, 2, 8), "k": random(1, 5, 2, 8), "v": random(1, 5, 4, 8)}
    delta |= {"g": -random(1, 5, 4), "beta": random(1, 5, 4), "cu_seqlens": words(0, 2, 5)}
    delta |= {"head_first": False, "use_qk_l2norm_in_kernel": True}
    return {
        "chunk_gated_delta_rule": {
            **delta,
            "scale": None,
            "initial_state": random(4, 4, 8, 8),
            "initial_state_indices": words(3, -1),
            "has_initial_state": torch.tensor([True, False]),
        },
        "chunk_gated_delta_rule_cpu": {**delta, "initial_state": random(2, 4, 8, 8)},
        "sampling_from_probs": {"probs": probs, "indices": None, "generator": None},
        "top_p_sampling_from_probs": {"probs": probs, "top_p": 0.9, "check_nan": False},
        "min_p_sampling_from_probs": {"probs": probs, "min_p": 0.1, "indices": words(0, 3, 3)},
        "top_k_top_p_sampling_from_probs": {"probs": probs, **top, "filter_apply_order": "joint"},
        "top_k_top_p_sampling_from_logits": {"logits": probs, **top, "generator": None},
        "top_k_renorm_probs": {"probs": probs, "top_k": 3},
        "top_p_renorm_probs": {"probs": probs, "top_p": 0.4},
        "top_k_mask_logits": {"logits": probs, "top_k": words(1, 2, 3, 4)},
        "merge_state": states,
        "merge_state_v2": states,
        "flash_attn_with_kvcache": {
            "q": random(2, 1, 4, 16),
            "k_cache": cache,
            "v_cache": cache,
            "sinks": None,
            **pages,
            **steps,
            **how,
        },
        "flash_attn_varlen_func": {"q": random(10, 4, 16), **ragged, **ends, **how},
        "apply_rope_with_cos_sin_cache_inplace": turned,
        "rotary_embedding": turned,
        "apply_token_bitmask_inplace_cuda": {
            "logits": random(4, 50),
            "bitmask": words(*[-1] * 8).view(4, 2),
            "indices": [1, 2],
        },
        "copy_to_gpu_no_ce": {"input": words(1, 2), "output": words(0, 0)},
        "sparse_attn_func": {"q": q, "k": q, "v": q, **lists, "softmax_scale": None, "out": None},
        "sparse_attn_varlen_func": {
            "q": q[0],
            "k": q[0],
            "v": q[0],
            **lists,
            "max_seqlen_q": 64,
            "max_seqlen_k": 64,
            "cu_seqlens_q": words(0, 64),
            "cu_seqlens_k": words(0, 64),
            "softcap": 0.0,
        },
    }


def hadamards() -> dict[str, dict[str, Any]]:
    """Valid calls of the Hadamard fronts."""
    given = {"x": random(2, 100), "scale": 0.5}
    return {f"hadamard_transform_{order}n": given for order in (12, 20, 28, 40)}


def marlins() -> dict[str, dict[str, Any]]:
    """Valid calls of the products with weights in Marlin's layout."""
    weight = torch.zeros(2, 1, 128, dtype=torch.int32)
    given = {"a": random(3, 16), "b_q_type": UINT4B8.id, "size_m": 3, "size_n": 64, "size_k": 16}
    given |= {"workspace": None, "is_k_full": True, "is_zp_float": False}
    none = dict.fromkeys(("global_scale", "b_zeros", "g_idx", "perm"))
    order = {"sorted_token_ids": words(*range(4)), "expert_ids": words(0)}
    moe = {f"{name}_or_none": None for name in ("c", "b_bias", *none)}
    how = {"moe_block_size": 4, "top_k": 1, "mul_topk_weights": True, "is_ep": False}
    return {
        "gptq_marlin_gemm": {
            "c": None,
            "b_q_weight": weight[0],
            "b_scales": random(1, 64),
            **none,
            **given,
        },
        "moe_wna16_marlin_gemm": {
            "b_q_weight": weight,
            "b_scales": random(2, 1, 64),
            "topk_weights": random(3, 1),
            "num_tokens_post_padded": words(4),
            **moe,
            **order,
            **how,
            **given,
        },
    }


def fp4() -> dict[str, dict[str, Any]]:
    """Of the grouped product in NVFP4."""
    sizes = {"problem_sizes": words(3, 8, 16).view(1, 3), "expert_offsets": words(0)}
    return {
        "cutlass_fp4_group_mm": {
            "a_fp4": torch.zeros(3, 8, dtype=torch.uint8),
            "b_fp4": torch.zeros(1, 8, 8, dtype=torch.uint8),
            "a_blockscale": torch.zeros(128, 4).to(torch.float8_e4m3fn),
            "b_blockscale": torch.zeros(1, 128, 4).to(torch.float8_e4m3fn),
            "alphas": random(1),
            "out_dtype": torch.float32,
            "params": {**sizes, "blockscale_offsets": words(0)},
        }
    }


CALLS = calls() | latent_calls() | transfers() | hadamards() | marlins() | fp4()


def fresh(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}


def refusal(front: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """Message of the BadArgument; None if the call succeeds. Other errors are raised."""
    try:
        front(**arguments)
    except BadArgument as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_another_type_are_named(name: str) -> None:
    front, given = getattr(ops, name), CALLS[name]
    assert refusal(front, fresh(given)) is None
    for argument in given:
        for odd in ODD:
            said = refusal(front, {**fresh(given), argument: odd})
            if isinstance(odd, (str, dict)) or type(odd) is object:
                # What has no effect is not looked at.
                assert said is None or f"`{argument}`" in said, odd


def test_buffers_without_slots_are_refused() -> None:
    given = copied("src dst")
    with pytest.raises(BadArgument, match="`dst` has no slots, 4 tokens are to be copied"):
        ops.transfer_kv_per_layer_mla(**{**given, "dst": torch.empty(0, 2, 16)})


def test_every_front_is_called_here() -> None:
    fronts = {name for op in all_ops() for name in op.fronts}
    assert fronts <= CALLS.keys()
