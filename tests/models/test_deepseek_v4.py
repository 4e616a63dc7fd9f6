"""DeepSeek-V4's config.json: both spellings, defaults, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cairn.errors import BadModel
from cairn.models.registry import load_spec
from cairn.specs.compressed import CompressionSpec
from cairn.specs.rotary import YarnSpec
from tests.specs import declared

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0],
    "rope_scaling": YARN,
}


def mixers(**changes: Any):
    return load_spec(FLASH | changes).mixers


def test_published_fields() -> None:
    spec = load_spec(FLASH)
    sparse = CompressionSpec(4, True, index_heads=64, index_dim=128, topk=512)
    found = [mixer.compression for mixer in spec.mixers]
    assert found == [None, sparse, CompressionSpec(128, False), sparse]
    assert [sparse.reach, found[2].reach] == [8, 128]
    assert [mixer.rotary.theta for mixer in spec.mixers] == [10000, 160000, 160000, 160000]
    assert [mixer.rotary.scaling for mixer in spec.mixers[:2]] == [None, YarnSpec(16, 65536)]
    # YaRN without temperature: cos and sin have no factor.
    assert {mixer.rotary.attention_factor for mixer in spec.mixers} == {1.0}
    assert (spec.mixers[0].head_dim, spec.mixers[0].rotary.head_dim) == (512, 64)
    assert [layer.ffn.router.table_rows for layer in spec.layers] == [129280] * 3 + [0]
    assert [layer.ffn.router.bias for layer in spec.layers] == [False] * 3 + [True]
    assert spec.layers[0].ffn.limit == 0 and spec.streams.count == 4


def test_the_draft_layer_by_the_released_names() -> None:
    told = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    spec = load_spec(FLASH | told)
    found = declared(replace(spec, draft=spec.draft_layer)).values()
    names = {one.source for weight in found for one in (weight, *weight.beside)}
    own = {name for name in names if name.startswith("mtp.") and ".experts." not in name}
    maps = ["e_proj", "h_proj", *(f"attn.{name}" for name in ("wq_a", "wkv", "wq_b", "wo_a"))]
    maps += ["attn.wo_b", *(f"ffn.shared_experts.w{i}" for i in (1, 2, 3))]
    norms = ["enorm", "hnorm", "norm", "attn_norm", "ffn_norm", "attn.q_norm", "attn.kv_norm"]
    streams = [f"hc_{at}_{x}" for at in ("attn", "ffn", "head") for x in ("fn", "base", "scale")]
    others = ["attn.attn_sink", "ffn.gate.weight", "ffn.gate.bias", *streams]
    others += [f"{name}.weight" for name in (*maps, *norms)] + [f"{name}.scale" for name in maps]
    assert own == {f"mtp.0.{name}" for name in others}
    assert "mtp.0.ffn.experts.255.w2.scale" in names
    # A draft layer with another compression rate, or several draft layers, cannot be used.
    for change in ({"compress_ratios": [0, 4, 128, 4, 4]}, {"num_nextn_predict_layers": 2}):
        assert load_spec(FLASH | change).draft_layer is None


def test_layer_types_win_over_ratios() -> None:
    kinds = {
        "layer_types": [SPARSE, HEAVY, SLIDING, HEAVY],
        "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
        "compress_rates": {HEAVY: 16},
    }
    spec = load_spec(FLASH | kinds)
    rates = [mixer.compression and mixer.compression.rate for mixer in spec.mixers]
    assert rates == [4, 16, None, 16]
    assert [bool(layer.ffn.router.table_rows) for layer in spec.layers] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": None, "rope_parameters": YARN},
        {
            "rope_scaling": None,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10000},
                "compress": YARN | {"rope_theta": 160000, "attention_factor": 1.0},
            },
        },
    ],
)
def test_spellings_of_the_two_rotations(rope) -> None:
    assert mixers(**rope) == mixers()


def test_compressed_layers_without_a_longer_context() -> None:
    rotary = mixers(rope_scaling=None)[1].rotary
    assert rotary.scaling is None and rotary.theta == 160000


def test_experts_in_either_format() -> None:
    told = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    found = [load_spec(FLASH | told | more).quantization for more in ({}, {"expert_dtype": "fp8"})]
    assert [(q.scale_name, q.experts) for q in found] == [("scale", "fp4"), ("scale", "block")]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"compress_ratios": None}, "compress_ratios is None.*Write it, or layer_types"),
        ({"compress_ratios": [0, 4, 8, 4]}, "8.*unknown rate"),
        ({"compress_ratios": [0, 4]}, "not one entry for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 4}, "unknown kind of layer"),
        ({"layer_types": [SPARSE] * 4, "compress_rates": {SPARSE: 0}}, "not an integer >= 1"),
        ({"compress_rates": {"other": 4}, "layer_types": [SPARSE] * 4}, "not a rate by kind"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"scoring_func": "sigmoid"}, "Only 'sqrtsoftplus' is supported"),
        ({"num_key_value_heads": 4}, "all heads share one record"),
        ({"o_groups": 7}, "64 heads do not fill them"),
        ({"index_head_dim": 32}, "its last 64 dimensions"),
        ({"index_topk": 8192}, "too many for a selection"),
        ({"qk_rope_head_dim": 7}, "not pairs"),
        ({"expert_dtype": "int4"}, "expert_dtype is 'int4'"),
        ({"num_experts_per_tok": 300}, "there are 256 experts"),
        ({"mlp_layer_types": ["dense"] * 4}, "unknown kind of layer"),
        ({"model_type": "deepseek_v41"}, "shared key sources"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(BadModel, match=match):
        load_spec(FLASH | changes)
