"""A GGUF file as a checkpoint: its metadata as a config.json, its tensors by Hugging Face's names.

Read with llama.cpp's package `gguf`. Blocks are dequantised on the device that is filled
(`cairn.ops.gguf`). Files of Llama keep the rows of queries and keys in the order of interleaved
rotary pairs; they are reordered to halves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.errors import BadModel

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""general.architecture -> model_type."""
FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Metadata behind the architecture's name -> field of config.json."""
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
FLOATS = {0: "F32", 1: "F16", 30: "BF16"}
"""Formats without quantisation."""
FREQUENCIES = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class _Part:
    """A tensor by Hugging Face's name: one of the file, or one expert of it.

    Attributes:
        own: as the package reads it.
        expert: its number; None: the tensor is whole.
        heads: of rows in the order of interleaved pairs; 0: rows are in order.
    """

    own: Any
    expert: int | None = None
    heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Slowest axis first."""
        shape = tuple(int(n) for n in reversed(self.own.shape))
        return shape if self.expert is None else shape[1:]


class GgufFile:
    """A GGUF file: its header is read at once, tensors when they are asked for.

    Args:
        path: of the file.

    Raises:
        BadModel: without the package gguf, or for a file that is truncated, of an architecture that
            is not known, or with tensors that are not.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise BadModel(
                f"{path} is a GGUF file, and the package gguf, which reads it, is not installed",
                "pip install gguf",
            ) from None
        self.path = path
        try:
            self._reader: Any = GGUFReader(path)
        except Exception as error:
            # The package raises various errors on a broken file; users get one line.
            raise BadModel(
                f"{path} is truncated or corrupt: {error}", "Copy the file again"
            ) from error
        self.config = self._config()
        self.tensors = dict(self._named())

    def value(self, name: str, default: Any = None) -> Any:
        """A value of the metadata."""
        field = self._reader.fields.get(name)
        return default if field is None else field.contents()

    def _config(self) -> dict[str, Any]:
        architecture = self.value("general.architecture")
        if architecture not in ARCHITECTURES:
            raise BadModel(
                f"{self.path}: general.architecture is {architecture!r}, which is not known",
                f"Known: {', '.join(ARCHITECTURES)}",
            )
        config: dict[str, Any] = {"model_type": ARCHITECTURES[architecture]}
        for name, field in FIELDS.items():
            found = self.value(f"{architecture}.{name}")
            if found is not None:
                config[field] = found
        if "head_dim" not in config and architecture != "qwen2":
            config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        if architecture == "qwen2":
            config.pop("head_dim", None)
        names = {str(one.name): one for one in self._reader.tensors}
        table = names.get("token_embd.weight")
        if table is None:
            raise BadModel(f"{self.path} has no tensor token_embd.weight", "Copy the file again")
        config["vocab_size"] = int(table.shape[1])
        config["tie_word_embeddings"] = "output.weight" not in names
        for name in ("bos", "eos"):
            token = self.value(f"tokenizer.ggml.{name}_token_id")
            if token is not None:
                config[f"{name}_token_id"] = int(token)
        config["torch_dtype"] = "bfloat16"
        scaling = self._scaling(architecture, names.get(FREQUENCIES))
        if scaling is not None:
            config["rope_scaling"] = scaling
        return config

    def _scaling(self, architecture: str, factors: Any) -> dict[str, Any] | None:
        """rope_scaling from the metadata; Llama 3.1 has a tensor of factors in its place."""
        kind = self.value(f"{architecture}.rope.scaling.type", "none")
        if kind != "none":
            scaling = f"{architecture}.rope.scaling."
            found = {"rope_type": kind, "factor": self.value(f"{scaling}factor")}
            original = self.value(f"{scaling}original_context_length")
            return (
                found
                if original is None
                else {**found, "original_max_position_embeddings": original}
            )
        if factors is None:
            return None
        largest = float(max(factors.data.tolist()))
        return {"rope_type": "llama3", "factor": largest, **LLAMA3}

    def _named(self) -> Iterator[tuple[str, _Part]]:
        """Tensors by Hugging Face's names; a tensor of all experts gives one entry an expert."""
        turned: dict[str, int] = {}
        if self.config["model_type"] == "llama":
            turned = {
                "attn_q": self.config["num_attention_heads"],
                "attn_k": self.config.get(
                    "num_key_value_heads", self.config["num_attention_heads"]
                ),
            }
        for tensor in self._reader.tensors:
            name = str(tensor.name)
            if name in OUTER:
                yield OUTER[name], _Part(tensor)
                continue
            found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if name == FREQUENCIES:
                continue
            if found is None or found[2] not in INNER.keys() | EXPERTS.keys():
                raise BadModel(
                    f"{self.path}: {name} is no tensor of this architecture", "Use another"
                )
            layer, kind, end = f"model.layers.{found[1]}.", found[2], found[3]
            if kind in INNER:
                yield f"{layer}{INNER[kind]}.{end}", _Part(tensor, None, turned.get(kind, 0))
                continue
            for expert in range(int(tensor.shape[2])):
                yield f"{layer}mlp.experts.{expert}.{EXPERTS[kind]}.{end}", _Part(tensor, expert)

    def dtype(self, name: str) -> str:
        """The dtype by safetensors' name; F32 for quantised blocks, which are dequantised to it."""
        return FLOATS.get(int(self.tensors[name].own.tensor_type), "F32")

    def span(self, name: str) -> tuple[int, int]:
        """Where the bytes of a tensor begin and end."""
        own = self.tensors[name].own
        return int(own.data_offset), int(own.data_offset + own.n_bytes)

    def read(self, name: str, device: str) -> Tensor:
        """A tensor: dequantised to float32, or in its stored dtype. Raises BadModel for an unknown
        format."""
        import torch

        from cairn.ops.gguf.blocks import KINDS, dequantised

        part = self.tensors[name]
        kind = int(part.own.tensor_type)
        data = part.own.data if part.expert is None else part.own.data[part.expert]
        stored = torch.from_numpy(data.copy()).to(device)
        if kind == 30:
            value = stored.view(torch.bfloat16).view(part.shape)
        elif kind in FLOATS:
            value = stored.view(part.shape)
        elif kind in KINDS:
            value = dequantised(stored, KINDS[kind]).view(part.shape)
        else:
            raise BadModel(
                f"{self.path}: {name} is of format {kind}, which is not known", "Use another"
            )
        return _in_halves(value, part.heads) if part.heads else value

    def opened(self, device: str) -> _Opened:
        """A reader with the interface of an open safetensors file."""
        return _Opened(lambda name: self.read(name, device))


@dataclass(frozen=True)
class _Opened:
    """The two calls of an open safetensors file that loading needs."""

    read: Callable[[str], Tensor]

    def get_slice(self, name: str) -> Tensor:
        """A tensor, which can be indexed."""
        return self.read(name)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor."""
        return self.read(name)


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * d, ..] of interleaved rotary pairs, reordered to two halves."""
    pairs = rows.unflatten(0, (heads, -1, 2))
    halves: Tensor = pairs.transpose(1, 2).flatten(0, 2)
    return halves


def config_of(path: Path) -> Mapping[str, Any]:
    """The metadata of a file as the content of a config.json. Raises BadModel; see `GgufFile`."""
    return GgufFile(path).config
