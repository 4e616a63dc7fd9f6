"""GGUF files as models: logits equal those of a folder with the dequantised values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.config import EngineOptions
from cairn.engine.build import build
from cairn.engine.tokenizer import load_tokenizer
from cairn.errors import BadModel
from cairn.models.registry import load_spec
from tests.engine.harness import difference, greedy, run
from tests.models.quantised import DENSE, MOE, save
from tests.specs import declared
from tests.support import shows

gguf = pytest.importorskip("gguf")

SIZES = {**DENSE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SIZES, "model_type": "llama", "num_key_value_heads": 2}),
    "qwen2": ("qwen2", {**SIZES, "model_type": "qwen2", "head_dim": 128}),
    "qwen3": ("qwen3", SIZES),
    "qwen3_moe": ("qwen3moe", {**MOE, "hidden_size": 256, "moe_intermediate_size": 256}),
}
KINDS = {"q_proj": "Q8_0", "down_proj": "Q4_0", "up_proj": "Q5_1", "embed_tokens": "F16"}
"""Formats that the gguf package can write; other matrices are float32."""
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
PROMPT = [[int(n) for n in np.random.default_rng(0).integers(0, 64, 20)]]


def own_name(name: str) -> tuple[str, int | None]:
    """llama.cpp's name of a tensor, and its expert."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight", None
    _, _, layer, *inner, end = name.split(".")
    if inner[:2] == ["mlp", "experts"]:
        kind = f"ffn_{inner[3].removesuffix('_proj')}_exps"
        return f"blk.{layer}.{kind}.{end}", int(inner[2])
    return f"blk.{layer}.{NAMES['.'.join(inner)]}.{end}", None


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in the order 0, d / 2, 1, d / 2 + 1, .."""
    size = len(rows) // heads
    order = [size // 2 * (i % 2) + i // 2 for i in range(size)]
    return rows.reshape(heads, size, -1)[:, order].reshape(rows.shape)


def write(path: Path, architecture: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """A file of random values, and the dequantised tensors by Hugging Face's names."""
    torch.manual_seed(2)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    words = [chr(n) for n in range(0x41, 0x7F)][: config["vocab_size"] - 2]
    tokens = [*words, "ab", "<end>"][: config["vocab_size"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_eos_token_id(len(tokens) - 1)
    plain: dict[str, Tensor] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in declared(load_spec(config)).items():
        if weight.parameter is None:
            continue
        scale = weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 0.3
        numbers = (scale * torch.randn(weight.shape) + (len(weight.shape) == 1)).numpy()
        kind = next((kind for part, kind in KINDS.items() if part in name), "F32")
        number = gguf.GGMLQuantizationType[kind if numbers.ndim > 1 else "F32"]
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        turned = next((n for part, n in heads.items() if part in name), 0)
        turned = turned if architecture == "llama" else 0
        order = interleaved(np.arange(len(numbers))[:, None], turned)[:, 0] if turned else ...
        stored = gguf.quants.quantize(numbers[order], number)
        value = gguf.quants.dequantize(stored, number)
        back = np.empty_like(value)
        back[order] = value
        plain[name] = torch.from_numpy(back)
        own, expert = own_name(name)
        if expert is None:
            writer.add_tensor(own, stored, raw_dtype=number)
        else:
            experts.setdefault(own, []).append(stored)
            if expert == config["num_experts"] - 1:
                writer.add_tensor(own, np.stack(experts[own]), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def logits(path: Path) -> np.ndarray:
    options = EngineOptions(dtype="float32", device="cpu", page_size=16, kv_cache_memory="1MiB")
    [got] = run(build(path, options), PROMPT, greedy(1, prompt_logprobs=True))
    return got.prompt_logprobs


@shows("llama qwen2", "quantised weights")
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_the_folder(model: str, tmp_path: Path) -> None:
    architecture, config = MODELS[model]
    path = tmp_path / "model.gguf"
    plain = write(path, architecture, {**config, "tie_word_embeddings": model == "qwen3"})
    tied = {"tie_word_embeddings": model == "qwen3"}
    folder = save(tmp_path / "plain", {**config, **tied}, plain)
    spec = load_spec(path)
    assert spec.architecture == config["model_type"] and spec.tied == (model == "qwen3")
    assert difference(logits(path), logits(folder)) < 1e-4


def test_the_tokenizer_comes_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "qwen2", MODELS["qwen2"][1])
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("cabab")) == "cabab"
    assert len(tokenizer.encode("cabab")) == 3
    assert tokenizer.eos_token_id == 63


def test_a_file_that_is_cut_off_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", MODELS["llama"][1])
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    with pytest.raises(BadModel, match=r"model.gguf is truncated or corrupt"):
        load_spec(path)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(BadModel, match="does not begin as a GGUF file"):
        load_spec(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(BadModel, match=r"architecture is 'mamba'.*Known: llama, qwen2"):
        load_spec(path)
