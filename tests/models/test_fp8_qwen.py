"""Qwen3 and Qwen3.5 with experts in fp8 blocks give the results of the dequantised weights;
matrices of `modules_to_not_convert` are read unconverted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cairn.errors import BadModel
from cairn.layers.residual import Hidden, Product
from cairn.layers.schemes.fp8_block import Fp8BlockScheme
from cairn.models.registry import load_model, load_spec
from tests.models.test_qwen_hybrid import tiny
from tests.specs import declared

BLOCK = 8
LAYER = {
    "qwen3_moe": "model.layers.",
    "qwen3_5_moe": "model.language_model.layers.",
}


def quantized(model_type: str, **more: Any) -> dict[str, Any]:
    config, layers = tiny(model_type), LAYER[model_type]
    plain = ["lm_head", *(f"{layers}{i}.mlp.gate" for i in range(4))]
    plain += [f"{layers}{i}.linear_attn.in_proj_{x}" for i in range(4) for x in "ab"]
    plain += [f"{layers}3.self_attn.o_proj", f"{layers}1.mlp.experts.2.down_proj"]
    own = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": plain,
    }
    return {**config, "quantization_config": own | more}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors of every name that the model reads, including the scales of codes."""
    torch.manual_seed(5)
    found: dict[str, Tensor] = {}
    for name, weight in declared(load_spec(config)).items():
        if weight.dtypes == ("F8_E4M3",):
            found[name] = (torch.randn(weight.shape) * 60).to(torch.float8_e4m3fn)
            blocks = [-(-n // BLOCK) for n in weight.shape]
            found[f"{name}_scale_inv"] = (0.5 + torch.rand(blocks)) / 240
        elif not name.endswith("_scale_inv"):
            found[name] = torch.randn(weight.shape) / 4
    return found


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"]
            for axis in (0, 1):
                scale = scale.repeat_interleave(BLOCK, axis)
            tensor = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        found[name] = tensor
    return found


def load(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return load_model(folder, load_spec(folder), "float32", "cpu")


@pytest.mark.parametrize("model_type", LAYER)
def test_as_the_dequantised_model(model_type: str, tmp_path: Path) -> None:
    config = quantized(model_type)
    tensors = tensors_of(config)
    kept = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    layers = LAYER[model_type]
    assert f"{layers}0.mlp.experts.0.gate_proj.weight" in kept
    assert f"{layers}3.self_attn.q_proj.weight" in kept
    assert f"{layers}3.self_attn.o_proj.weight" not in kept
    assert not any(name.endswith((".gate.weight", "in_proj_a.weight")) for name in kept)
    model = load(tmp_path / "codes", config, tensors)
    plain = load(tmp_path / "plain", tiny(model_type), dequantised(tensors))
    assert isinstance(model.layers[0].ffn.gate_up.scheme, Fp8BlockScheme)
    x = torch.randn(5, 16)
    for mine, other in zip(model.layers, plain.layers, strict=True):
        got, wanted = (block.ffn(Hidden(x)) for block in (mine, other))
        got, wanted = (y.value() if isinstance(y, Product) else y for y in (got, wanted))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        joint = "qkv" if hasattr(mine.mixer, "qkv") else "inputs"
        for name in (joint, "out"):
            maps = [getattr(block.mixer, name) for block in (mine, other)]
            read = torch.randn(3, maps[0].in_features)
            first, second = (linear(read) for linear in maps)
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_names_that_are_no_names() -> None:
    with pytest.raises(BadModel, match=r"modules_to_not_convert is 'lm_head': not a list"):
        load_spec(quantized("qwen3_moe", modules_to_not_convert="lm_head"))
