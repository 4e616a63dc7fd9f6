"""Quantised checkpoints give the results of their dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.config import EngineOptions
from cairn.engine.build import build
from cairn.errors import BadConfig, BadModel
from cairn.layers.schemes.base import Chosen, PlainScheme
from cairn.layers.schemes.stored import CodesScheme, PackedScheme
from cairn.models.registry import load_model, load_spec
from cairn.runner.memory import NO_STEPS
from tests.engine.harness import difference, greedy, run
from tests.models.quantised import DENSE, FORMATS, MOE, folders
from tests.support import shows

PACKED = ("gptq 4", "gptq 8", "gptq act order", "gptq v2", "awq", "w4a16", "w8a16", "w4a16 zeros")
CODES = ("w8a8 int8", "w8a8 fp8", "w8a8 fp8 of a matrix", "fp8")
PROMPTS = [[int(n) for n in np.random.default_rng(0).integers(0, 64, 20)]]


def logits(folder: Path, **options: Any) -> np.ndarray:
    """Log-probabilities after each token of the prompt."""
    given = {"dtype": "float32", "device": "cpu", "page_size": 16, "kv_cache_memory": "1MiB"}
    built = build(folder, EngineOptions(**given | options))
    [got] = run(built, PROMPTS, greedy(1, prompt_logprobs=True))
    return got.prompt_logprobs


@shows("qwen3", "quantised weights")
@pytest.mark.parametrize("form", FORMATS)
def test_dense_as_the_dequantised_model(form: str, tmp_path: Path) -> None:
    stored, plain = folders(tmp_path, DENSE, form)
    model = load_model(stored, load_spec(stored), "float32", "cpu")
    kind = PackedScheme if form in PACKED else CodesScheme if form in CODES else object
    assert isinstance(model.layers[0].mixer.qkv.scheme, kind)
    assert isinstance(model.layers[1].ffn.down.scheme, PlainScheme) or form == "w8a8 fp8 blocks"
    assert difference(logits(stored), logits(plain)) < 1e-4


@shows("qwen3_moe", "quantised weights")
@pytest.mark.parametrize("form", ["gptq 4", "awq", "w4a16", "w8a8 int8", "w8a8 fp8", "nvfp4"])
def test_experts_as_of_the_dequantised_model(form: str, tmp_path: Path) -> None:
    stored, plain = folders(tmp_path, MOE, form)
    assert difference(logits(stored), logits(plain)) < 1e-4


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "experts"])
def test_fp8_on_load_rounds_every_matrix(config: dict[str, Any], tmp_path: Path) -> None:
    _, plain = folders(tmp_path, config, "awq")
    got, exact = logits(plain, quantization="fp8"), logits(plain)
    assert 1e-4 < difference(got, exact) < 1.0
    rounded = {}
    for name, x in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = x.abs().amax(1, keepdim=True) / 448
            x = (x / scale).to(torch.float8_e4m3fn).float() * scale
        rounded[name] = x
    save_file(rounded, plain / "model.safetensors")
    assert difference(got, logits(plain)) < 1e-4
    stored, _ = folders(tmp_path / "other", DENSE, "fp8")
    with pytest.raises(BadConfig, match="quantization is fp8, but the checkpoint is quantised"):
        logits(stored, quantization="fp8")


IGNORED = ("input_scale", "input_global_scale", "weight_shape")


@pytest.mark.parametrize("form", FORMATS)
def test_a_tensor_that_is_not_there_or_of_another_shape_is_named(form: str, tmp_path: Path) -> None:
    """Codes, scales and zero points of a matrix, each with a row removed, or omitted."""
    stored, _ = folders(tmp_path, DENSE, form)
    tensors, first = load_file(stored / "model.safetensors"), "model.layers.1.self_attn.k_proj."
    own = [name for name in tensors if name.startswith(first) and not name.endswith(IGNORED)]
    if not FORMATS[form][1].get("desc_act", False):
        own = [name for name in own if not name.endswith("g_idx")]
    assert len(own) > 1
    for name in own:
        rest = {other: x for other, x in tensors.items() if other != name}
        one = tensors[name]
        other = one[:-1].clone() if one.dim() and len(one) > 1 else torch.ones(3, dtype=one.dtype)
        for written, words in (({**rest, name: other}, "misshapen"), (rest, "missing")):
            save_file(written, stored / "model.safetensors")
            with pytest.raises(BadModel, match=f"{words}: {name}"):
                load_model(stored, load_spec(stored), "float32", "cpu")


def test_maps_of_one_input_have_one_order(tmp_path: Path) -> None:
    stored, _ = folders(tmp_path, DENSE, "gptq act order")
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    save_file({**tensors, name: tensors[name].flip(0)}, stored / "model.safetensors")
    with pytest.raises(BadModel, match=f"{name} differs from that of another map"):
        load_model(stored, load_spec(stored), "float32", "cpu")
    twice = {end: tensors[end] * 0 for end in tensors if end.endswith("g_idx")}
    save_file({**tensors, **twice}, stored / "model.safetensors")
    with pytest.raises(BadModel, match="g_idx does not give every group 32 columns"):
        load_model(stored, load_spec(stored), "float32", "cpu")


@pytest.mark.parametrize("form", ["gptq 4", "w8a8 fp8", "nvfp4"])
def test_a_scale_that_is_no_number_is_named(form: str, tmp_path: Path) -> None:
    stored, _ = folders(tmp_path, DENSE, form)
    tensors = load_file(stored / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith(("scales", "weight_scale")))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(BadModel, match=name.rpartition(".")[0]):
        load_model(stored, load_spec(stored), "float32", "cpu")


@pytest.mark.parametrize(
    "method, words",
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes are quantised on load by its own library"),
        ({"quant_method": "mlx"}, "'mlx': weights of MLX are in Apple's layout"),
        ({"quant_method": "exl2"}, "ExLlamaV2"),
        ({"quant_method": "new"}, "'new': quantised weights of this method, which are not"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5: not one of 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "not one group of settings"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo is 'W4A8'"),
    ],
)
def test_other_methods_are_refused_by_name(method: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel, match=words):
        load_spec({**DENSE, "quantization_config": method})


def test_a_folder_may_have_gptqs_own_file_too(tmp_path: Path) -> None:
    stored, _ = folders(tmp_path, DENSE, "gptq 4")
    (stored / "quantize_config.json").write_text(json.dumps({"bits": 4}))
    assert load_spec(stored).quantization is not None


@pytest.mark.parametrize("form", ["gptq 4", "gptq act order", "w8a8 int8", "w8a8 fp8"])
def test_packed_experts_give_what_dequantised_ones_give(form: str, tmp_path: Path) -> None:
    """The implementation for GPUs."""
    stored, _ = folders(tmp_path, MOE, form)
    model = load_model(stored, load_spec(stored), "float32", "cpu")
    ffn = model.layers[0].ffn
    scheme, x = ffn.gate_up.scheme, torch.randn(5, 64)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]], dtype=torch.int32)
    chosen = Chosen(torch.rand(5, 2), ids)
    wanted = scheme.experts(ffn.gate_up, ffn.down, x, chosen)
    got = scheme.packed_experts(ffn.gate_up, ffn.down, x, chosen)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@shows("qwen3", "CUDA graph")
@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
def test_dense_on_a_gpu(form: str, tmp_path: Path) -> None:
    """In float32 as the dequantised model; in bfloat16, where W8A8 rounds activations to 8 bits,
    close to it, and equal with and without graphs."""
    stored, plain = folders(tmp_path, DENSE, form)
    exact, cuda = logits(plain), {"device": "cuda", "disable_cuda_graph": True}
    assert difference(logits(stored, **cuda), exact) < 1e-3
    half = logits(stored, **cuda, dtype="bfloat16")
    assert divergence(exact, half) < 0.02
    in_graphs(stored)


@shows("qwen3_moe", "CUDA graph")
@pytest.mark.gpu
@pytest.mark.parametrize("form", ["gptq 4", "gptq act order", "awq", "w8a8 int8", "w8a8 fp8"])
def test_experts_on_a_gpu(form: str, tmp_path: Path) -> None:
    stored, plain = folders(tmp_path, MOE, form)
    exact, cuda = logits(plain), {"device": "cuda", "disable_cuda_graph": True}
    assert difference(logits(stored, **cuda), exact) < 1e-3
    assert divergence(exact, logits(stored, **cuda, dtype="bfloat16")) < 0.05
    in_graphs(stored)


def divergence(exact: np.ndarray, coarse: np.ndarray) -> float:
    """Mean over tokens of the Kullback-Leibler divergence of log-probabilities."""
    return float((np.exp(exact) * (exact - coarse)).sum(-1).mean())


def in_graphs(folder: Path) -> None:
    """Decode steps of one to three rows in CUDA graphs give the results of eager steps, up to a
    token that another order of sums changes."""
    prompts = [PROMPTS[0][:length] for length in (20, 3, 9)]
    given = {"dtype": "bfloat16", "device": "cuda", "page_size": 16, "max_num_seqs": 4}
    found = []
    for off in (False, True):
        options = EngineOptions(**given, kv_cache_memory="1MiB", disable_cuda_graph=off)
        with patch("cairn.engine.build.measured", return_value=NO_STEPS):
            built = build(folder, options)
        assert (built.runner.graphs is None) == off
        found.append(run(built, prompts, greedy(8)))
    for got, wanted in zip(*found, strict=True):
        pairs = zip(got.tokens, wanted.tokens, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(got.tokens) - 1) + 1
        assert difference(got.logprobs[:same], wanted.logprobs[:same]) < 0.1
