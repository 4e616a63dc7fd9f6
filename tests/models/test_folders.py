"""Paths that are not model folders: each error says what to give instead."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from cairn.errors import BadModel
from cairn.models.checkpoint import read_headers
from cairn.models.registry import load_spec


@pytest.fixture
def folder(tmp_path, tiny):
    """A config.json without weights."""
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    return tmp_path


def refused(path, *words):
    with pytest.raises(BadModel) as caught:
        load_spec(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def configured(folder, tiny, **fields):
    (folder / "config.json").write_text(json.dumps(tiny | fields))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", {"group_size": 64, "bits": 4}),
        ("compression_config", {"format": "int-quantized"}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("quant_config", {"w_bit": 4}),
        ("quantize", True),
    ],
)
def test_a_quantized_checkpoint_told_in_config(folder, tiny, name, value):
    refused(configured(folder, tiny, **{name: value}), f"{name} is ", "bfloat16")


@pytest.mark.parametrize("value", [None, {}, False])
def test_no_quantization(folder, tiny, value):
    load_spec(configured(folder, tiny, quantization=value))


@pytest.mark.parametrize(
    "name",
    [
        *("scales", "biases", "qweight", "qzeros", "g_idx", "weight_scale", "weight_scale_inv"),
        *("weight_packed", "weight.absmax", "weight.quant_state.bitsandbytes__nf4", "SCB"),
    ],
)
def test_a_quantized_checkpoint_told_by_its_tensors(folder, name):
    tensor = f"model.layers.0.mlp.up_proj.{name}"
    save_file({tensor: torch.ones(2, 2)}, folder / "model.safetensors")
    refused(folder, "are quantized", tensor, "bfloat16")


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_a_quantized_checkpoint_told_by_a_file(folder, name):
    save_file({"model.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    (folder / name).write_text("{}")
    refused(folder, name, "quantized")


def test_a_gguf_file(tmp_path, folder):
    (tmp_path / "model-q4.gguf").write_bytes(b"GGML\x03\0\0\0")
    refused(tmp_path / "model-q4.gguf", "does not begin as a GGUF file")
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refused(folder, "model-q4.gguf", "GGUF file")
    (tmp_path / "config.json").unlink()
    refused(folder, "model-q4.gguf", "GGUF file")


def test_a_gguf_file_beside_weights_is_left_alone(folder):
    save_file({"model.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    (folder / "model-q4.gguf").write_bytes(b"GGUF\x03\0\0\0")
    load_spec(folder)


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter(folder, with_config):
    if not with_config:
        (folder / "config.json").unlink()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"base.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")
    refused(folder, "LoRA adapter", "Merge it into its base model (Qwen/Qwen3-0.6B)")
    (folder / "adapter_config.json").write_text("[")
    refused(folder, "LoRA adapter", "Merge it into its base model and")


def test_the_cache_of_the_hub(tmp_path, folder):
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (folder / "config.json").rename(snapshot / "config.json")
    refused(cache, "has no config.json", f"Give {snapshot}")
    refused(cache / "snapshots", f"Give {snapshot}")
    load_spec(snapshot)


def test_the_output_of_a_training(tmp_path, folder):
    inner = tmp_path / "output" / "checkpoint-500"
    inner.mkdir(parents=True)
    (folder / "config.json").rename(inner / "config.json")
    refused(tmp_path / "output", f"Give {inner}")


def test_a_name_of_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("Qwen/Qwen3-0.6B", "not a folder", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B")
    refused(tmp_path / "absent", "not a folder", "holds config.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_the_folder(folder, name):
    (folder / name).touch()
    refused(folder / name, "is not a folder", f"Give the folder that holds it: {folder}")


@pytest.mark.parametrize("name", ["model_index.json", "params.json"])
def test_other_kinds_of_checkpoints(tmp_path, name):
    (tmp_path / name).write_text("{}")
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text("{}")
    refused(tmp_path, name, "config.json and safetensors")


def test_weights_under_other_names(folder):
    for name in ("weights.safetensors", "tf_model.h5"):
        (folder / name).write_bytes(b"")
    with pytest.raises(BadModel, match=r"only tf_model\.h5, weights\.safetensors"):
        read_headers(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_pointer_of_git_lfs(folder, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / name).write_text(pointer)
    refused(folder, "pointer of Git LFS", "git lfs pull")
