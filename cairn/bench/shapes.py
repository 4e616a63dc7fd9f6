"""Model folders with published geometries and random weights, and their dense counterparts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cairn.errors import BadConfig
from cairn.names import suggestion

_BLOCK_345M: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 100278,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1 << 20,
    "attention_bias": False,
    "eos_token_id": 100257,
    "bos_token_id": 100257,
}

_LANDMARKS_345M: dict[str, Any] = {
    "architectures": ["HiLSForCausalLM"],
    "model_type": "qwen_hils",
    "chunk_size": 64,
    "hils_topk": 32,
    "use_sliding_window": True,
    "sliding_window": 512,
    "hils_sliding_window": 512,
    "full_attn_interleave": 1,
    "enable_prior_query": True,
    "enable_softmax1": True,
    "enable_lmk_q_proj": True,
    "lmk_q_lora_dim": -1,
    "apply_hils_rope": True,
    "enable_inrange_rope": True,
    "rope_context_length": 8192,
    "rope_period_multiplier": 2.0,
    "insert_landmarks": True,
    "adjust_lmk_pos": True,
}

_DENSE: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

_BLOCK_7B: dict[str, Any] = {
    "architectures": ["HiLSForCausalLM"],
    "model_type": "olmo_hils",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 100278,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "max_position_embeddings": 1 << 20,
    "attention_bias": False,
    "full_attn_interleave": 4,
    "use_sliding_window": True,
    "sliding_window": 512,
    "eos_token_id": 100257,
    "bos_token_id": 100257,
}

_LANDMARKS_7B: dict[str, Any] = {
    "chunk_size": 64,
    "hils_topk": 32,
    "hils_sliding_window": 512,
    "enable_prior_query": True,
    "enable_softmax1": False,
    "enable_lmk_q_proj": True,
    "lmk_q_lora_dim": 256,
    "layerwise_qk_norm": True,
    "layerwise_lmkq_norm": True,
    "apply_hils_rope": True,
    "use_hope": True,
    "enable_inrange_rope": True,
    "rope_context_length": 8192,
    "rope_period_multiplier": 2.0,
    "insert_landmarks": True,
    "adjust_lmk_pos": True,
    "mask_lmk_token": True,
    "enable_external_lmk_embed": True,
}

_WITHOUT_LANDMARKS_7B: dict[str, Any] = {
    "replace_full_attention_with_hils": False,
    "insert_landmarks": False,
}

_DSA_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 102400,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 163840,
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
"""DeepSeek-V2-Lite's widths with V3.2's attention: it fits one GPU."""

_V4_SLICE: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 1,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""DeepSeek-V4-Flash's widths and every kind of its layers: it fits one GPU."""

_FLOAT8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}

_GLM_SLICE: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 9,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "vocab_size": 154880,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "max_position_embeddings": 202752,
    "num_nextn_predict_layers": 0,
    "quantization_config": _FLOAT8,
    "bos_token_id": 154822,
    "eos_token_id": 154820,
}
"""GLM-5's widths and nine of its 78 layers, in float8: they fit one GPU of 80 GB."""

_QWEN_3_8B: dict[str, Any] = _DENSE | {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_QWEN_35: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 248046,
}

_QWEN_35_2B = _QWEN_35 | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}

_QWEN_35_9B = _QWEN_35 | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": False,
}

_QWEN_35_35B = _QWEN_35 | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "345m": {
        "hsa": _BLOCK_345M | _LANDMARKS_345M,
        "dense": _BLOCK_345M | _DENSE,
    },
    "7b": {
        "hsa": _BLOCK_7B | _LANDMARKS_7B,
        "dense": _BLOCK_7B | _WITHOUT_LANDMARKS_7B,
    },
    "dsa-lite": {"dsa": _DSA_LITE},
    "dsa-lite-fp8": {"dsa": _DSA_LITE | {"quantization_config": _FLOAT8}},
    "glm-slice": {"dsa": _GLM_SLICE},
    "v4-slice": {"compressed": _V4_SLICE},
    "q35-2b": {"hybrid": _QWEN_35_2B},
    "q35-9b": {"hybrid": _QWEN_35_9B},
    "q35-35b-a3b": {"hybrid": _QWEN_35_35B},
    "qwen3-8b": {"dense": _QWEN_3_8B},
}
"""Shape -> attention kind ("hsa"; "dense": the same layers without landmarks; "dsa": latent
attention over tokens that an indexer selects; "compressed": over a window and compressed entries of
earlier tokens; "hybrid": gated delta nets between layers of full attention) -> config.json."""
KINDS = ("hsa", "dense", "dsa", "compressed", "hybrid")


def kinds_of(shape: str) -> tuple[str, ...]:
    """Attention kinds of a shape; for unknown shapes those of a model folder."""
    return tuple(SHAPES.get(shape, ("hsa", "dense")))


def config_of(shape: str, kind: str, overlap: bool = False) -> dict[str, Any]:
    """The config of a shape.

    Args:
        shape: a key of SHAPES.
        kind: one of KINDS.
        overlap: landmark layers have no positions (NoPE), so adjacent queries with equal tokens
            select mostly the same pages.

    Raises:
        BadConfig: an unknown shape or kind.
    """
    if shape not in SHAPES:
        raise BadConfig(f"shape {shape!r} is unknown", suggestion(shape, SHAPES))
    if kind not in SHAPES[shape]:
        raise BadConfig(
            f"shape {shape!r} has no {kind!r} form", f"Known: {', '.join(SHAPES[shape])}"
        )
    config = dict(SHAPES[shape][kind])
    if overlap and kind == "hsa":
        config["apply_hils_rope"] = False
    return config


def write_folder(folder: Path, shape: str, kind: str, overlap: bool = False) -> Path:
    """Write a shape's config.json to `folder` and return the folder; weights are random, drawn at
    load."""
    text = json.dumps(config_of(shape, kind, overlap), indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
