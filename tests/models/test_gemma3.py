"""Gemma 3's config.json, with and without a vision encoder."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from cairn.errors import BadModel
from cairn.models.registry import load_spec
from tests.specs import declared

TEXT = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 6, "sliding_window": 512}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def test_layers_of_both_kinds():
    spec = load_spec({"model_type": "gemma3_text", "rope_scaling": LINEAR, **TEXT})
    assert [mixer.window for mixer in spec.mixers] == [512] * 5 + [None]
    window, full = spec.mixers[0].rotary, spec.mixers[5].rotary
    assert (window.theta, window.scaling) == (1e4, None)
    assert (full.theta, full.scaling.factor) == (1e6, 8.0)
    assert spec.embedding_scale == 32**0.5 and spec.tied


def test_newer_files_have_a_rotary_for_each_kind():
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": LINEAR | {"rope_theta": 7e5},
    }
    spec = load_spec({"model_type": "gemma3_text", "rope_parameters": rope, **TEXT})
    assert [spec.mixers[i].rotary.theta for i in (0, 5)] == [500.0, 7e5]
    assert spec.mixers[5].rotary.scaling.factor == 8.0


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_decoder_of_a_model_with_vision(tmp_path, prefix):
    """The prefix of tensor names depends on the exporting library."""
    config = {"model_type": "gemma3", "text_config": TEXT, "vision_config": {}, "eos_token_id": [1]}
    names = declared(load_spec(config))
    tensors = {
        name.replace("model.language_model.", prefix): torch.zeros(shape)
        for name, shape in ((n, t.shape) for n, t in names.items())
        if name.endswith("embed_tokens.weight")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(str(config).replace("'", '"'))
    spec = load_spec(tmp_path)
    assert spec.prefix == prefix and spec.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "gelu_pytorch_tanh"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(BadModel) as refused:
        load_spec({"model_type": "gemma3_text", **TEXT, **change})
    assert words in f"{refused.value.message} {refused.value.hint}"
