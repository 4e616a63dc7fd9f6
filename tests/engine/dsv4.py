"""Small DeepSeek-V4 models with random weights, and their logits computed from the formulas."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from cairn.engine.build import Built
from cairn.models.registry import load_model, load_spec
from tests.engine.harness import engine

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 160,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 40,
    "o_groups": 2,
    "o_lora_rank": 24,
    "layer_types": [SLIDING, SPARSE, HEAVY],
    "compress_rates": {SPARSE: 4, HEAVY: 32},
    "sliding_window": 20,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "swiglu_limit": 1.0,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-3,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""All kinds of layers; with pages of 16 slots a page holds 4 entries, or an entry spans two
pages."""
PAGE = 16


def made(folder: Path, **options: Any) -> Built:
    """An engine with generated weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    given = {"load_format": "random", "page_size": PAGE, "kv_cache_memory": "16MiB"}
    return engine(str(folder), **given | options)


def saved(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Write config.json and weights of such a model to a folder; returns the weights."""
    config = CONFIG | changes
    model = load_model(folder, load_spec(config), torch.float32, "cpu", random_seed=1)
    tensors = {weight.source: weight.place.clone() for weight in model.weights()}
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "ape", "attn_sink")):
            # Otherwise it would have no visible effect.
            tensor.mul_(3.0)
    write(folder, config, tensors)
    return tensors


IN_BLOCKS = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "shared_experts")
QUANTISED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A checkpoint."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def blocked(stored: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """Store a matrix in e4m3; returns its dequantised values."""
    rows, columns = (-(-n // 128) for n in tensor.shape)
    exponent = torch.arange(rows * columns).view(rows, columns) % 3 - 8
    scale = exponent.float().exp2().repeat_interleave(128, 0).repeat_interleave(128, 1)
    scale = scale[: tensor.shape[0], : tensor.shape[1]]
    stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
    stored[name.removesuffix("weight") + "scale"] = (
        (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    )
    return stored[name].float() * scale


def coded(stored: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """Store a matrix in e2m1; returns its dequantised values."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    groups = tensor.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    scale = exponent.exp2().unsqueeze(-1)
    codes = (groups / scale).unsqueeze(-1).sub(values).abs().argmin(-1)
    pairs = codes.flatten(1).to(torch.uint8)
    stored[name] = (pairs[:, 0::2] | pairs[:, 1::2] << 4).view(torch.int8)
    stored[name.removesuffix("weight") + "scale"] = (
        (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    )
    return (values[codes] * scale).flatten(1)


class Reference:
    """Logits of whole sequences, position by position.

    Args:
        config: of the model.
        weights: its tensors.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.c, self.w = config, weights

    def logits(self, ids: list[int]) -> Tensor:
        """Logits, [n, V] float32."""
        return self._joined(self._streams(ids), "")

    def guessed(self, ids: list[int]) -> Tensor:
        """Logits of the draft layer after each token but the first, [n - 1, V] float32."""
        at, tokens = "mtp.0.", torch.tensor(ids[1:])
        x = self._rms(self.w["embed.weight"][tokens], f"{at}enorm.weight")
        x = x @ self.w[f"{at}e_proj.weight"].T
        states = (self._rms(state, f"{at}hnorm.weight") for state in self._streams(ids[:-1]))
        streams = [x + state @ self.w[f"{at}h_proj.weight"].T for state in states]
        return self._joined(self._layer(streams, at, SLIDING, tokens), at)

    def _streams(self, ids: list[int]) -> list[Tensor]:
        """Hidden states after the last layer, each [n, hidden]."""
        tokens = torch.tensor(ids)
        x = self.w["embed.weight"][tokens]
        streams = [x.clone() for _ in range(self.c["hc_mult"])]
        for layer, kind in enumerate(self.c["layer_types"]):
            streams = self._layer(streams, f"layers.{layer}.", kind, tokens)
        return streams

    def _layer(self, streams: list[Tensor], at: str, kind: str, tokens: Tensor) -> list[Tensor]:
        mix = functools.partial(self._mix, at=at, kind=kind)
        streams = self._site(streams, f"{at}hc_attn", f"{at}attn_norm", mix)
        feed = functools.partial(self._feed, at=at, ids=tokens)
        return self._site(streams, f"{at}hc_ffn", f"{at}ffn_norm", feed)

    def _joined(self, streams: list[Tensor], at: str) -> Tensor:
        y = self._mixed(streams, f"{at}hc_head_fn")
        scale, base = self.w[f"{at}hc_head_scale"], self.w[f"{at}hc_head_base"]
        pre = torch.sigmoid(y * scale + base) + self.c["hc_eps"]
        x = sum(p.unsqueeze(1) * s for p, s in zip(pre.T, streams, strict=True))
        return self._rms(x, f"{at}norm.weight") @ self.w["head.weight"].T

    def _rms(self, x: Tensor, name: str | None = None) -> Tensor:
        y = x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5
        return y if name is None else y * self.w[name]

    def _mixed(self, streams: list[Tensor], name: str) -> Tensor:
        return self._rms(torch.cat(streams, dim=-1)) @ self.w[name].T

    def _site(self, streams: list[Tensor], name: str, norm: str, block: Any) -> list[Tensor]:
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        y = self._mixed(streams, f"{name}_fn")
        s, b = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        pre = torch.sigmoid(y[:, :n] * s[0] + b[:n]) + eps
        post = 2 * torch.sigmoid(y[:, n : 2 * n] * s[1] + b[n : 2 * n])
        a = (y[:, 2 * n :] * s[2] + b[2 * n :]).view(-1, n, n).softmax(-1) + eps
        a = a / (a.sum(1, keepdim=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            a = a / (a.sum(2, keepdim=True) + eps)
            a = a / (a.sum(1, keepdim=True) + eps)
        x = sum(pre[:, i : i + 1] * streams[i] for i in range(n))
        f = block(self._rms(x, f"{norm}.weight"))
        return [
            post[:, k : k + 1] * f + sum(a[:, j, k, None] * streams[j] for j in range(n))
            for k in range(n)
        ]

    def _angles(self, positions: Tensor, compressed: bool) -> Tensor:
        d = self.c["qk_rope_head_dim"]
        theta = self.c["compress_rope_theta" if compressed else "rope_theta"]
        f = theta ** -(torch.arange(0, d, 2) / d)
        scaling = self.c["rope_scaling"]
        if compressed and scaling:
            original = scaling["original_max_position_embeddings"]
            turns = torch.tensor([32.0, 1.0])
            edge = (
                d * torch.log(original / (turns * 2 * torch.pi)) / (2 * torch.tensor(theta).log())
            )
            low, high = max(edge[0].floor().item(), 0), min(edge[1].ceil().item(), d - 1)
            ramp = ((torch.arange(d // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
            f = f / scaling["factor"] * ramp + f * (1 - ramp)
        return positions[:, None] * f

    def _turn(self, x: Tensor, positions: Tensor, compressed: bool, sign: int = 1) -> Tensor:
        """Rotate the last dimensions of x [n, ..., D]."""
        d = self.c["qk_rope_head_dim"]
        angle = self._angles(positions, compressed)
        turned = torch.polar(torch.ones_like(angle), sign * angle)
        turned = turned.view(len(x), *(1,) * (x.dim() - 2), d // 2)
        pairs = torch.view_as_complex(x[..., -d:].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((x[..., :-d], torch.view_as_real(pairs * turned).flatten(-2)), dim=-1)

    def _entries(self, x: Tensor, at: str, rate: int, overlap: bool) -> Tensor:
        """[n // rate, d]."""
        values, logits = (x @ self.w[f"{at}{name}.weight"].T for name in ("wkv", "wgate"))
        logits = logits + self.w[f"{at}ape"][torch.arange(len(x)) % rate]
        d, found = self.w[f"{at}norm.weight"].shape[0], []
        for e in range(len(x) // rate):
            own = slice(e * rate, (e + 1) * rate)
            v, z = [values[own, -d:]], [logits[own, -d:]]
            if overlap and e:
                before = slice((e - 1) * rate, e * rate)
                v, z = [values[before, :d], *v], [logits[before, :d], *z]
            found.append((torch.cat(v) * torch.cat(z).softmax(0)).sum(0))
        if not found:
            return x.new_zeros(0, d)
        made = self._rms(torch.stack(found), f"{at}norm.weight")
        return self._turn(made, torch.arange(len(made)) * rate, True)

    def _mix(self, x: Tensor, at: str, kind: str) -> Tensor:
        c, at, count = self.c, f"{at}attn.", len(x)
        heads, dim, compressed = c["num_attention_heads"], c["head_dim"], kind != SLIDING
        t = torch.arange(count)
        latent = self._rms(x @ self.w[f"{at}wq_a.weight"].T, f"{at}q_norm.weight")
        q = self._rms((latent @ self.w[f"{at}wq_b.weight"].T).view(count, heads, dim))
        q = self._turn(q, t, compressed)
        kv = self._rms(x @ self.w[f"{at}wkv.weight"].T, f"{at}kv_norm.weight")
        keys = self._turn(kv, t, compressed)
        seen = (t <= t[:, None]) & (t > t[:, None] - c["sliding_window"])
        if compressed:
            rate = c["compress_rates"][kind]
            entries = self._entries(x, f"{at}compressor.", rate, kind == SPARSE)
            visible = torch.arange(len(entries)) < (t[:, None] + 1) // rate
            if kind == SPARSE:
                visible = self._selected(x, latent, f"{at}indexer.", rate, visible)
            keys, seen = torch.cat((keys, entries)), torch.cat((seen, visible), dim=1)
        scores = torch.einsum("thd,kd->htk", q, keys) * dim**-0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        sink = self.w[f"{at}attn_sink"].view(-1, 1, 1).expand(heads, count, 1)
        p = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        o = self._turn(torch.einsum("htk,kd->thd", p, keys), t, compressed, -1)
        groups, rank = c["o_groups"], c["o_lora_rank"]
        y = torch.einsum(
            "tgi,gri->tgr",
            o.reshape(count, groups, -1),
            self.w[f"{at}wo_a.weight"].view(groups, rank, -1),
        )
        return y.flatten(1) @ self.w[f"{at}wo_b.weight"].T

    def _selected(self, x: Tensor, latent: Tensor, at: str, rate: int, visible: Tensor) -> Tensor:
        c = self.c
        heads, dim = c["index_n_heads"], c["index_head_dim"]
        keys = self._entries(x, f"{at}compressor.", rate, True)
        q = (latent @ self.w[f"{at}wq_b.weight"].T).view(len(x), heads, dim)
        q = self._turn(q, torch.arange(len(x)), True)
        w = x @ self.w[f"{at}weights_proj.weight"].T * (heads * dim) ** -0.5
        scores = torch.einsum("th,thk->tk", w, torch.einsum("thd,kd->thk", q, keys).relu())
        best = scores.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True, stable=True)
        chosen = torch.zeros_like(visible)
        return chosen.scatter(1, best.indices[:, : c["index_topk"]], True) & visible

    def _feed(self, x: Tensor, at: str, ids: Tensor) -> Tensor:
        c, at = self.c, f"{at}ffn."
        active = c["num_experts_per_tok"]
        scores = functional.softplus(x @ self.w[f"{at}gate.weight"].T).sqrt()
        table = self.w.get(f"{at}gate.tid2eid")
        if table is None:
            ranks = scores + self.w[f"{at}gate.bias"]
            best = ranks.sort(dim=1, descending=True, stable=True)
            chosen = best.indices[:, :active]
        else:
            chosen = table[ids].long()
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * c["routed_scaling_factor"]
        y = self._expert(x, f"{at}shared_experts.")
        for e in range(c["n_routed_experts"]):
            share = (weights * (chosen == e)).sum(1, keepdim=True)
            y = y + share * self._expert(x, f"{at}experts.{e}.")
        return y

    def _expert(self, x: Tensor, at: str) -> Tensor:
        w1, w2, w3 = (self.w[f"{at}w{i}.weight"] for i in (1, 2, 3))
        limit = self.c["swiglu_limit"]
        gate = functional.silu((x @ w1.T).clamp(max=limit))
        return (gate * (x @ w3.T).clamp(-limit, limit)) @ w2.T
