"""From a folder to a spec and a module."""

from __future__ import annotations

import json

import pytest
import torch

from cairn.config import default_model_path
from cairn.errors import BadModel
from cairn.models.registry import load_model, load_spec
from tests.specs import hils_of


def test_unknown_models_name_the_known_ones():
    with pytest.raises(BadModel, match=r"'gpt_neox'.*qwen3, .*qwen_hils"):
        load_spec({"model_type": "gpt_neox", "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(BadModel, match="HiLSForCausalLM"):
        load_spec({"architectures": ["HiLSForCausalLM"]})
    assert load_spec({"architectures": ["Qwen3ForCausalLM"]}).architecture == "qwen3"


def test_repository_code_is_not_run(tmp_path, tiny, caplog):
    (tmp_path / "modeling.py").write_text("raise SystemExit(3)")
    tiny["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    with caplog.at_level("INFO", logger="cairn"):
        assert load_spec(tmp_path).architecture == "qwen_hils"
    assert "auto_map" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_unreadable_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadModel, match=r"config\.json"):
        load_spec(tmp_path)


def test_missing_folder_and_config(tmp_path):
    with pytest.raises(BadModel, match="not a folder"):
        load_spec(tmp_path / "absent")
    with pytest.raises(BadModel, match=r"no config\.json"):
        load_spec(tmp_path)


def test_generation_config_adds_eos_ids(tmp_path, tiny):
    (tmp_path / "config.json").write_text(json.dumps(tiny | {"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_spec(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(BadModel, match=r"^generation_config\.json: eos_token_id is 'x'"):
        load_spec(tmp_path)


def test_a_byte_order_mark_is_skipped(tmp_path, tiny):
    (tmp_path / "config.json").write_text(json.dumps(tiny | {"eos_token_id": 7}), "utf-8-sig")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}', "utf-8-sig")
    assert load_spec(tmp_path).eos_token_ids == (7, 9)


def test_default_model():
    spec = load_spec(default_model_path())
    assert (spec.num_layers, spec.page_size, hils_of(spec).topk, hils_of(spec).window) == (
        5,
        64,
        16,
        512,
    )
    assert spec.eos_token_ids == () and spec.max_model_len == 1 << 20


def test_random_weights_repeat_and_depend_on_the_seed(tiny, plain):
    spec = load_spec(tiny)
    tokens = torch.arange(30) % 40
    first, again, other = (
        plain(load_model("", spec, "float32", "cpu", random_seed=seed), tokens)[0]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.allclose(first, other)
    assert first.isfinite().all() and 0.1 < float(first.std()) < 10
