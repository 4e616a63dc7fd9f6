"""Tiny random checkpoints of every quantised format, and their dequantised values.

Codes are packed by `tests.ops.weight_only.packers`, which shares nothing with the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from cairn.models.registry import load_spec
from tests.ops.weight_only import packers
from tests.specs import declared

GROUP = 32
E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors of a matrix by the ends of their names, and the matrix [out, in] that they encode."""


def _integers(rows: int, columns: int, bits: int) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Codes [K, N], zero points [G, N], scales [G, N], and the group of each row."""
    rng, groups = np.random.default_rng(rows * columns), columns // GROUP
    codes = rng.integers(0, 1 << bits, (columns, rows))
    zeros = rng.integers(1, 1 << bits, (groups, rows))
    scales = (0.5 + torch.rand(groups, rows)).half() / (1 << bits) / 4
    return codes, zeros, scales, torch.arange(columns) // GROUP


def _value(codes: np.ndarray, zeros: Any, scales: Tensor, groups: Tensor) -> Tensor:
    middle = torch.as_tensor(zeros)[groups] if isinstance(zeros, np.ndarray) else zeros
    return ((torch.from_numpy(codes) - middle).float() * scales.float()[groups]).T.contiguous()


def gptq(rows: int, columns: int, bits: int = 4, ordered: bool = False, less: int = 1) -> Stored:
    codes, zeros, scales, groups = _integers(rows, columns, bits)
    if ordered:
        # Matrices with the same input have the same order.
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        groups = groups[order]
    tensors = {
        "qweight": packers.along_rows(codes, bits),
        "qzeros": packers.along_columns(zeros - less, bits),
        "scales": scales,
        "g_idx": groups.int(),
    }
    return tensors, _value(codes, zeros, scales, groups)


def awq(rows: int, columns: int) -> Stored:
    codes, zeros, scales, groups = _integers(rows, columns, 4)
    tensors = {"qweight": packers.awq(codes), "qzeros": packers.awq(zeros), "scales": scales}
    return tensors, _value(codes, zeros, scales, groups)


def words(rows: int, columns: int, bits: int = 4, zero: bool = False) -> Stored:
    codes, zeros, scales, groups = _integers(rows, columns, bits)
    tensors = {
        "weight_packed": packers.along_columns(codes.T, bits),
        "weight_scale": scales.T.contiguous().bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zero:
        tensors["weight_zero_point"] = packers.along_rows(zeros.T, bits)
    middle = zeros if zero else 1 << bits - 1
    return tensors, _value(codes, middle, scales.bfloat16(), groups)


def codes(rows: int, columns: int, kind: str, strategy: str) -> Stored:
    made = torch.randn(rows, columns) * (40 if kind == "int" else 100)
    made = made.clamp(-127, 127).to(torch.int8) if kind == "int" else made.clamp(-448, 448).to(E4M3)
    shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // GROUP)}[strategy]
    scale = (0.5 + torch.rand(shape)) / 800
    factor = scale.repeat_interleave(GROUP, 1) if strategy == "group" else scale
    return {"weight": made, "weight_scale": scale}, made.float() * factor


def blocks(rows: int, columns: int) -> Stored:
    made = (100 * torch.randn(rows, columns)).clamp(-448, 448).to(E4M3)
    scale = (0.5 + torch.rand(-(-rows // GROUP), -(-columns // GROUP))) / 800
    factor = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return {"weight": made, "weight_scale": scale}, made.float() * factor[:rows, :columns]


def fp8_of_matrix(rows: int, columns: int) -> Stored:
    tensors, value = codes(rows, columns, "float", "tensor")
    extra = {"input_scale": torch.tensor(0.5), "weight_scale": tensors["weight_scale"].reshape(())}
    return tensors | extra, value


def nvfp4(rows: int, columns: int, modelopt: bool = False) -> Stored:
    made = torch.randint(0, 16, (rows, columns))
    scale, factor = (1 + 3 * torch.rand(rows, columns // 16)).to(E4M3), torch.tensor([0.02])
    value = E2M1[made] * (scale.float() * factor).repeat_interleave(16, 1)
    pairs = (made[:, ::2] | made[:, 1::2] << 4).to(torch.uint8)
    if modelopt:
        return {"weight": pairs, "weight_scale": scale, "weight_scale_2": factor[0]}, value
    divisor = 1 / factor
    value = E2M1[made] * (scale.float() * (1 / divisor)).repeat_interleave(16, 1)
    extra = {"weight_global_scale": divisor, "input_global_scale": torch.ones(1)}
    return {"weight_packed": pairs, "weight_scale": scale, **extra}, value


def mxfp4(rows: int, columns: int) -> Stored:
    made = torch.randint(0, 16, (rows, columns))
    scale = torch.randint(119, 123, (rows, columns // 32), dtype=torch.uint8)
    value = E2M1[made] * (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
    pairs = (made[:, ::2] | made[:, 1::2] << 4).to(torch.uint8)
    return {"weight_packed": pairs, "weight_scale": scale}, value


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": own}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*layers.1.mlp.down_proj"],
    }


def _gptq(**more: Any) -> dict[str, Any]:
    own = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    return {**own, "dynamic": {r"-:.*layers\.1\.mlp\.down_proj": {}}, **more}


PLAIN = "layers.1.mlp.down_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "modules_to_not_convert": [PLAIN]}
FORMATS: dict[str, tuple[Callable[[int, int], Stored], dict[str, Any]]] = {
    "gptq 4": (gptq, _gptq()),
    "gptq 8": (lambda r, c: gptq(r, c, 8), _gptq(bits=8)),
    "gptq act order": (lambda r, c: gptq(r, c, 4, True), _gptq(desc_act=True)),
    "gptq v2": (lambda r, c: gptq(r, c, less=0), _gptq(checkpoint_format="gptq_v2")),
    "awq": (awq, AWQ),
    "w4a16": (words, compressed("pack-quantized", num_bits=4)),
    "w8a16": (lambda r, c: words(r, c, 8), compressed("pack-quantized")),
    "w4a16 zeros": (
        lambda r, c: words(r, c, 4, True),
        compressed("pack-quantized", num_bits=4, symmetric=False),
    ),
    "w8a8 int8": (
        lambda r, c: codes(r, c, "int", "channel"),
        compressed("int-quantized", strategy="channel"),
    ),
    "int8 groups": (lambda r, c: codes(r, c, "int", "group"), compressed("int-quantized")),
    "w8a8 fp8": (
        lambda r, c: codes(r, c, "float", "channel"),
        compressed("float-quantized", type="float", strategy="channel"),
    ),
    "w8a8 fp8 of a matrix": (
        lambda r, c: codes(r, c, "float", "tensor"),
        compressed("float-quantized", type="float", strategy="tensor"),
    ),
    "w8a8 fp8 blocks": (
        blocks,
        compressed(
            "float-quantized", type="float", strategy="block", block_structure=[GROUP, GROUP]
        ),
    ),
    "fp8": (
        fp8_of_matrix,
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": [f"model.{PLAIN}"],
        },
    ),
    "nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", num_bits=4, type="float")),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", num_bits=4, type="float")),
    "modelopt nvfp4": (
        lambda r, c: nvfp4(r, c, True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"*{PLAIN}"]},
    ),
}

DENSE = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 128,
}  # fmt: skip
MOE = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip


def is_quantised(name: str) -> bool:
    """Whether a tensor is a quantised matrix of these models, by its name."""
    inner = name.endswith("_proj.weight") and ".layers." in name
    return inner and f"{PLAIN}." not in name


def folders(at: Path, config: dict[str, Any], form: str) -> tuple[Path, Path]:
    """A folder in a format, and the dequantised one in float32."""
    torch.manual_seed(1)
    make, quantization = FORMATS[form]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in declared(load_spec(config)).items():
        if weight.parameter is None:
            continue
        if is_quantised(name):
            parts, plain[name] = make(*weight.shape)
            stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
        else:
            scale = weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 0.2
            stored[name] = plain[name] = scale * torch.randn(weight.shape)
    written = {**config, "quantization_config": quantization}
    return save(at / "stored", written, stored), save(at / "plain", config, plain)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A model folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder
