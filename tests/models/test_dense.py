"""Dense families: their configs, and Qwen3's logits compared with the plain layers of landmark
models."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from cairn.errors import BadModel
from cairn.models.registry import load_model, load_spec
from tests.specs import bytes_per_token, declared, hils_of, kinds


def test_defaults():
    spec = load_spec({"model_type": "qwen3"})
    own = spec.mixers[0]
    assert (own.head_dim, own.num_heads, own.num_kv_heads, spec.num_layers) == (128, 32, 32, 32)
    assert spec.page_size is None and not spec.landmarks and hils_of(spec) is None
    assert set(kinds(spec)) == {"full"} and not spec.tied
    assert own.rotary.rounded
    assert bytes_per_token(spec, torch.bfloat16) == 32 * 2 * 32 * 128 * 2


def test_windows():
    config = {"model_type": "qwen3", "num_hidden_layers": 4, "max_window_layers": 2}
    assert {mixer.window for mixer in load_spec(config).mixers} == {None}
    on = config | {"use_sliding_window": True, "sliding_window": 9}
    assert [mixer.window for mixer in load_spec(on).mixers] == [None, None, 9, 9]
    types = ["sliding_attention", "full_attention"] * 2
    assert [x.window for x in load_spec(on | {"layer_types": types}).mixers] == [9, None, 9, None]
    with pytest.raises(BadModel, match="sliding_attention"):
        load_spec(config | {"layer_types": types})


def test_longest_context():
    """YaRN extends the context by its factor; the base of `dynamic` would depend on the sequence
    length."""
    config = {"model_type": "qwen2", "max_position_embeddings": 32768}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert load_spec(config | {"rope_scaling": yarn}).max_model_len == 131072
    dynamic = load_spec(config | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert dynamic.max_model_len == 32768 and dynamic.mixers[0].rotary.scaling is None


def test_biases():
    """Qwen2 has biases in q, k and v only; Llama's option includes the output projection."""
    own = load_spec({"model_type": "qwen2"}).mixers[0]
    assert (own.bias, own.out_bias) == (True, False)
    own = load_spec({"model_type": "llama", "attention_bias": True}).mixers[0]
    assert (own.bias, own.out_bias) == (True, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4}},
            "low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": 65}, "head_dim is 65"),
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(BadModel, match=words):
        load_spec({"model_type": "qwen3", **change})


def test_equals_the_landmark_family_without_landmark_layers(tmp_path, tiny, plain):
    common = tiny | {"full_attn_interleave": 0, "insert_landmarks": False}
    common |= {"use_sliding_window": True, "sliding_window": 12}
    dense = {k: v for k, v in common.items() if k in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "use_sliding_window",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "sliding_window",
    )}  # fmt: skip
    dense |= {"model_type": "qwen3", "head_dim": 8, "max_window_layers": 0}
    spec = load_spec(common)
    tensors = {n: 0.3 * torch.randn(t.shape) for n, t in declared(spec).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    logits = []
    for config in (common, dense):
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = load_model(tmp_path, load_spec(tmp_path), "float32", "cpu")
        logits.append(plain(model, torch.arange(30) % 40)[0])
    assert torch.equal(*logits)
