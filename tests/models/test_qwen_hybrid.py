"""Qwen3 with experts, Qwen3-Next and Qwen3.5: config.json as a ModelSpec, and the tensors that are
read."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cairn.attention.registry import cache_schema
from cairn.cache.schema import PageFormat
from cairn.errors import BadModel
from cairn.models.registry import load_model, load_spec
from cairn.specs.ffn import DenseFfn, MoeFfn
from cairn.specs.gated_delta import GatedDeltaSpec
from cairn.specs.gqa import GqaSpec
from cairn.specs.model import ModelSpec, describe
from tests.specs import declared

FLAT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
TINY = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip


def layers(spec: ModelSpec, kind: type) -> list[int]:
    """Indices of the layers with this kind of mixer or feed-forward part."""
    parts = [(layer.mixer, layer.ffn) for layer in spec.layers]
    return [i for i, both in enumerate(parts) if any(type(part) is kind for part in both)]


def tiny(model_type: str, **more: Any) -> dict[str, Any]:
    """A small config; nested if the family nests it."""
    sparse = "moe" in model_type or model_type == "qwen3_next"
    fields = {n: v for n, v in TINY.items() if sparse or not ("expert" in n or "moe" in n)}
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        text = {"model_type": f"{model_type}_text", **fields, **more}
        vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8,
                  "patch_size": 2, "num_position_embeddings": 4}  # fmt: skip
        return {"model_type": model_type, "text_config": text, "vision_config": vision}
    return {"model_type": model_type, **fields, **more}


def test_defaults_of_35():
    spec = load_spec({"model_type": "qwen3_5", "text_config": {}})
    delta, attention = spec.mixers[0], spec.mixers[3]
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (4096, 32, 248320)
    assert isinstance(delta, GatedDeltaSpec) and isinstance(attention, GqaSpec)
    assert (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim) == (
        16,
        32,
        128,
        128,
    )
    assert (delta.conv_kernel, delta.grouped) == (4, False)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 4, 256)
    assert attention.output_gate and attention.unit_offset and spec.norm.unit_offset
    assert attention.rotary is not None and attention.rotary.head_dim == 64
    assert layers(spec, GqaSpec) == [i for i in range(32) if i % 4 == 3]
    assert {type(layer.ffn) for layer in spec.layers} == {DenseFfn}
    # 24 states of 2 MiB, and inputs of convolutions of 8192 channels (Qwen3.5-9B: 49.1 MiB).
    schema = cache_schema(spec.mixers, PageFormat(64, torch.bfloat16))
    assert schema.row_bytes == 24 * (2 * 2**20 + 48 * 2**10)
    assert schema.groups[0].page_bytes == 64 * 32 * 2**10


def test_defaults_of_next_and_of_experts():
    spec = load_spec({"model_type": "qwen3_next"})
    assert (spec.hidden_size, spec.num_layers, spec.mixers[3].num_kv_heads) == (2048, 48, 2)
    assert spec.mixers[0].grouped
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoeFfn)
    assert (ffn.experts, ffn.active, ffn.intermediate, ffn.shared) == (512, 10, 512, 512)
    assert ffn.router.renormalize and ffn.shared_gate and ffn.router.score == "softmax"
    ffn = load_spec({"model_type": "qwen3_5_moe", "text_config": {}}).layers[0].ffn
    assert (ffn.experts, ffn.active, ffn.shared, ffn.router.renormalize) == (256, 8, 512, True)
    spec = load_spec({"model_type": "qwen3_moe"})
    ffn, mixer = spec.layers[0].ffn, spec.mixers[0]
    assert (ffn.experts, ffn.active, ffn.intermediate, ffn.shared) == (128, 8, 768, 0)
    assert not ffn.router.renormalize and not ffn.shared_gate
    assert mixer.head_dim == 64 and not mixer.unit_offset and not mixer.output_gate
    assert mixer.rotary.head_dim == 64


def test_which_layers():
    base = tiny("qwen3_next")
    assert layers(load_spec(base | {"full_attention_interval": 2}), GqaSpec) == [1, 3]
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert layers(load_spec(base | {"layer_types": kinds}), GqaSpec) == [0, 3]
    sparse = base | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert layers(load_spec(sparse), MoeFfn) == [1]
    assert layers(load_spec(base | {"num_experts": 0}), MoeFfn) == []
    # All layers of the newer family have experts, and weights are always normalized.
    newer = load_spec(tiny("qwen3_5_moe_text", norm_topk_prob=False, mlp_only_layers=[0]))
    assert layers(newer, MoeFfn) == [0, 1, 2, 3]
    assert newer.layers[0].ffn.router.renormalize
    assert not load_spec(base | {"norm_topk_prob": False}).layers[0].ffn.router.renormalize
    assert load_spec(tiny("qwen3_moe", norm_topk_prob=True)).layers[0].ffn.router.renormalize


@pytest.mark.parametrize("model_type", [*FLAT, "qwen3_5", "qwen3_5_moe"])
def test_both_spellings_of_the_rotary_embedding(model_type: str):
    old = tiny(model_type, rope_theta=5e5, partial_rotary_factor=0.5, rope_scaling=None)
    parameters = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5,
                  "mrope_section": [2, 1, 1], "mrope_interleaved": True}  # fmt: skip
    new = tiny(model_type, rope_parameters=parameters)
    for config in (old, new):
        rotary = load_spec(config).mixers[3].rotary
        assert (rotary.head_dim, rotary.theta) == (8, 5e5)


def test_nested_fields():
    config = tiny("qwen3_5", eos_token_id=5, tie_word_embeddings=True, torch_dtype="bfloat16")
    spec = load_spec(config)
    assert (spec.prefix, spec.eos_token_ids, spec.tied) == ("model.language_model.", (5,), True)
    assert spec.dtype == "bfloat16" and spec.architecture == "qwen3_5"
    # Fields at the top level take precedence, and overrides apply to nested ones.
    config |= {"eos_token_id": [7, 8], "tie_word_embeddings": False, "dtype": "float16"}
    spec = load_spec(config, {"num_hidden_layers": 2, "full_attention_interval": 2})
    assert (spec.eos_token_ids, spec.tied, spec.num_layers) == ((7, 8), False, 2)
    assert layers(spec, GqaSpec) == [1]
    sources = {name: source for name, _, source in describe(spec)}
    assert sources["num_hidden_layers"] == "override"
    assert sources["vision_config"] == "config"
    assert load_spec(tiny("qwen3_5_text")).prefix == "model."


def test_no_field_of_a_release_is_called_unknown(caplog):
    more = {"mamba_ssm_dtype": "float32", "output_gate_type": "swish", "attn_output_gate": True,
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
            "router_aux_loss_coef": 0.001, "full_attention_interval": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip
    outer = {"image_token_id": 30, "video_token_id": 31, "vision_start_token_id": 32,
             "vision_end_token_id": 33}  # fmt: skip
    with caplog.at_level(logging.WARNING):
        load_spec(tiny("qwen3_5_moe", **more) | outer)
        assert not caplog.records
        load_spec(tiny("qwen3_5", linear_num_kye_heads=3))
    assert "linear_num_key_heads" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen3_next", {"linear_num_key_heads": 2, "linear_num_value_heads": 3}, "num_value_heads"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_next", {"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ("qwen3_next", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ("qwen3_next", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("qwen3_next", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ("qwen3_next", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_next", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ("qwen3_5_text", {"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved"),
        ("qwen3_5_text", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
        (
            "qwen3_5_text",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "rope_parameters says 0.25",
        ),
    ],
)
def test_refusals(model_type, change, words):
    with pytest.raises(BadModel, match=words):
        load_spec(tiny(model_type, **change))


def test_a_nested_family_needs_its_text_config():
    with pytest.raises(BadModel, match="text_config"):
        load_spec(TINY | {"model_type": "qwen3_5"})
    with pytest.raises(BadModel, match=r"text_config\.model_type"):
        load_spec(tiny("qwen3_5") | {"text_config": {"model_type": "qwen3_5_moe_text"}})


def save(folder, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def test_experts_in_one_tensor_or_one_by_one(tmp_path):
    config = tiny("qwen3_5_moe") | {"vision_config": None}
    tensors = {n: torch.randn(w.shape) for n, w in declared(load_spec(config)).items()}
    save(tmp_path / "apart", config, tensors)
    fused, head = {}, "model.language_model.layers.0.mlp.experts."
    for layer in range(4):
        own = head.replace("0", str(layer), 1)
        gate, up, down = (
            torch.stack([tensors.pop(f"{own}{e}.{name}_proj.weight") for e in range(4)])
            for name in ("gate", "up", "down")
        )
        fused |= {f"{own}gate_up_proj": torch.cat((gate, up), 1), f"{own}down_proj": down}
    # Tensors that are not part of the text model are ignored.
    more = {"mtp.fc.weight": torch.zeros(2), "model.visual.merger.norm.bias": torch.zeros(3)}
    save(tmp_path / "fused", config, tensors | fused | more)
    models = [
        load_model(tmp_path / name, load_spec(tmp_path / name), "float32", "cpu")
        for name in ("apart", "fused")
    ]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_unexpected_tensors_are_named(tmp_path):
    config = tiny("qwen3_next")
    tensors = {n: torch.randn(w.shape) for n, w in declared(load_spec(config)).items()}
    save(tmp_path / "m", config, tensors | {"model.visual.x": torch.zeros(1)})
    with pytest.raises(BadModel, match=r"unexpected: model\.visual\.x"):
        load_model(tmp_path / "m", load_spec(tmp_path / "m"), "float32", "cpu")


def test_the_embedding_of_a_nested_model_says_the_dtype(tmp_path):
    config = tiny("qwen3_5")
    tensors = {n: torch.randn(w.shape).bfloat16() for n, w in declared(load_spec(config)).items()}
    table = "model.language_model.embed_tokens.weight"
    tensors[table] = torch.randn(48, 16).bfloat16()
    save(tmp_path / "m", config, tensors)
    spec = load_spec(tmp_path / "m")
    assert (spec.dtype, spec.embedding_rows, spec.vocab_size) == ("bfloat16", 48, 40)
    load_model(tmp_path / "m", spec, "bfloat16", "cpu")


def test_decays_stay_in_float32():
    model = load_model(".", load_spec(tiny("qwen3_next")), "bfloat16", "cpu", random_seed=0)
    mixer = model.layers[0].mixer
    assert {mixer.a_log.dtype, mixer.dt_bias.dtype} == {torch.float32}
    assert mixer.conv.dtype == mixer.inputs.weight.dtype == torch.bfloat16
