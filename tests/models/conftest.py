"""A step without paging: one row with its whole sequence, and attention computed from its formulas.

It is slow and independent of the engine's ops, cache and backends, so it tells whether a model is
right before any of those is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.attention.inputs import GqaInputs, HilsInputs
from cairn.models.registry import load_model, load_spec
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec
from cairn.specs.model import ModelSpec

DATA = Path(__file__).parents[1] / "data"


@dataclass
class PlainLayer:
    """One layer of a PlainBatch."""

    step: PlainBatch
    index: int

    @property
    def completed(self) -> Tensor:
        return self.step.completed

    def kv_target(self) -> None:
        return None

    def run(self, inputs: GqaInputs) -> Tensor:
        return self.step.attend(self.index, inputs)


class PlainBatch:
    """All slots of one sequence as one step; both the step and its batch.

    Args:
        spec: the model.
        tokens: [N] user tokens.
    """

    def __init__(self, spec: ModelSpec, tokens: Tensor) -> None:
        self.spec = spec
        self.page = spec.page_size or 1 << 30
        self.heads = next(m.num_heads for m in spec.mixers if isinstance(m, GqaSpec))
        count = tokens.shape[0]
        slots = count + count // (self.page - 1) if spec.landmarks else count
        self.slot = torch.arange(slots)
        self.inserted = None
        self.last = (self.slot + 1) % self.page == 0
        if spec.landmarks:
            self.positions = self.slot - self.slot // self.page
            self.input_ids = torch.full((slots,), spec.landmark_id)
            self.is_user = ~self.last
            self.input_ids[self.is_user] = tokens
        else:
            self.positions, self.input_ids = self.slot, tokens.clone()
            self.is_user = torch.ones(slots, dtype=torch.bool)
        self.completed = self.last.nonzero().flatten()
        self.traced: dict[int, dict[str, Tensor]] = {}
        self.batch = self
        self.layers = [PlainLayer(self, i) for i in range(spec.num_layers)]

    def attend(self, layer: int, inputs: GqaInputs) -> Tensor:
        mixer, q, k, v = self.spec.mixers[layer], inputs.q, inputs.k, inputs.v
        assert isinstance(mixer, GqaSpec)
        assert q.shape[1:] == (mixer.num_heads, mixer.head_dim)
        assert k.shape == v.shape and k.shape[1] == mixer.num_kv_heads
        if not isinstance(mixer, HilsSpec):
            assert not isinstance(inputs, HilsInputs)
            return self._plain(mixer, q.float(), k.float(), v.float()).to(q.dtype)
        lmk_q, summary_query = inputs.lmk_q, inputs.summary_query
        if summary_query is None and mixer.needs_summary_query:
            summary_query = lmk_q[self.completed]
        return self._hils(layer, q, k, v, lmk_q, summary_query).to(q.dtype)

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        """[h_q, L, L]"""
        group = q.shape[1] // k.shape[1]
        keys = k.repeat_interleave(group, dim=1)
        return torch.einsum("shd,thd->hst", q, keys) * q.shape[-1] ** -0.5

    def _plain(self, layer: GqaSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, t = self.slot[:, None], self.slot[None]
        visible = t <= s
        if layer.window is not None:
            visible &= t >= s - layer.window + 1
        if layer.mask_landmarks:
            visible &= ~self.last[None]
        p = self._logits(q, k).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hst,thd->shd", p, self._per_head(v))

    def _per_head(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // x.shape[1], dim=1)

    def _hils(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, z: Tensor, mu: Tensor | None
    ) -> Tensor:
        hils = self.spec.mixers[layer]
        assert isinstance(hils, HilsSpec)
        q, k, v, z = (x.float() for x in (q, k, v, z))
        size, s = self.page, self.slot
        scale = hils.head_dim**-0.5
        first = (s - hils.local_window + 1).div(
            size, rounding_mode="floor"
        )  # = P(s) where positive
        logits = self._logits(q, k)
        visible = (s[None] >= first[:, None] * size) & (s[None] <= s[:, None]) & ~self.last[None]
        window = logits.masked_fill(~visible, -torch.inf)
        lse = window.logsumexp(-1)  # [h, L]
        o_window = torch.einsum("hst,thd->shd", window.softmax(-1), self._per_head(v))
        pages = s.shape[0] // size
        key, bias = self._summaries(hils, k, z, mu, pages)
        u = torch.einsum("shd,phd->hsp", z, self._per_head(key)) * scale
        if bias is not None:
            u = u + bias.T[:, None]
        candidate = torch.arange(pages) < first[:, None]
        u = u.masked_fill(~candidate, -torch.inf)
        total = torch.logaddexp(lse, u.logsumexp(-1)) if pages else lse
        kv_heads = k.shape[1]
        score = (u - total[..., None]).unflatten(0, (kv_heads, -1)).amax(1)  # [h_kv, L, P]
        order = score.sort(dim=-1, descending=True, stable=True).indices[..., : hils.topk]
        chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, True) & candidate
        chosen = chosen.repeat_interleave(z.shape[1] // kv_heads, dim=0)
        terms = [u.masked_fill(~chosen, -torch.inf), lse[..., None]]
        if hils.softmax1:
            terms.append(torch.zeros_like(lse)[..., None])
        weights = torch.cat(terms, dim=-1).softmax(-1)
        inside = logits[..., : pages * size].unflatten(-1, (pages, size))[..., :-1].softmax(-1)
        values = self._per_head(v)[: pages * size].unflatten(0, (pages, size))[:, :-1]
        # The last slots of incomplete windows do not matter: a page without weight adds nothing.
        o_pages = torch.einsum("hsp,hspi,pihd->shd", weights[..., :pages], inside, values)
        o = o_pages + weights[..., pages].T[..., None] * o_window
        self.traced[layer] = {
            "q": q, "k": k, "v": v, "lmk_q": z, "o": o, "lse": lse.T, "swa_o": o_window,
            "lmk_k": key, "chosen": chosen,
        }  # fmt: skip
        if bias is not None:
            self.traced[layer]["prior_b"] = bias
        return o

    def _summaries(
        self, hils: HilsSpec, k: Tensor, z: Tensor, mu: Tensor | None, pages: int
    ) -> tuple[Tensor, Tensor | None]:
        """R [P, h, d] and b [P, h_q]."""
        assert hils.needs_summary_query == (mu is not None)
        paged = k[: pages * self.page].unflatten(0, (pages, self.page))
        key, bias = paged[:, -1], None
        if mu is not None:
            assert mu.shape == (pages, *z.shape[1:])
            pooled, entropy = _pool(mu.float(), paged)
            bias = entropy if hils.bias_by_entropy else None
            if hils.summary == "prior":
                key = pooled
                if hils.group_query:
                    mean = mu.float().unflatten(1, (k.shape[1], -1)).mean(2)
                    key = _pool(mean, paged)[0]
        if hils.summary == "mean":
            key = paged.mean(1)
        return key, bias


def _pool(mu: Tensor, paged: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax pooling of a page's keys without its last slot, and the entropy of the softmax."""
    keys = paged[:, :-1].repeat_interleave(mu.shape[1] // paged.shape[2], dim=2)
    p = (torch.einsum("phd,pihd->phi", mu, keys) * mu.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("phi,pihd->phd", p, keys), -(p * p.log()).nan_to_num(0.0).sum(-1)


def run_plain(model: Any, tokens: Tensor) -> tuple[Tensor, PlainBatch]:
    """Logits [N, V] at the user tokens, and the step that computed them."""
    batch = PlainBatch(model.spec, tokens)
    with torch.inference_mode():
        logits = model.logits(model(batch)[batch.is_user])
    return logits, batch


@pytest.fixture
def plain() -> Callable[[Any, Tensor], tuple[Tensor, PlainBatch]]:
    """Run a model on one whole sequence."""
    return run_plain


@pytest.fixture
def data() -> Path:
    """Folder of the test data."""
    return DATA


TINY: dict[str, Any] = {
    "model_type": "qwen_hils", "torch_dtype": "float32", "vocab_size": 40, "hidden_size": 32,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "chunk_size": 8, "hils_topk": 2,
    "hils_sliding_window": 8, "full_attn_interleave": 2, "enable_lmk_q_proj": True,
    "lmk_q_lora_dim": 4, "apply_hils_rope": True,
}  # fmt: skip


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Config of a small landmark model: layer 0 is plain, layer 1 has landmarks."""
    return json.loads(json.dumps(TINY))


@pytest.fixture
def drawn() -> Callable[[Mapping[str, Any]], Any]:
    """A random model with a config."""

    def make(config: Mapping[str, Any]) -> Any:
        spec = load_spec(config)
        return load_model("", spec, spec.dtype, "cpu", random_seed=7)

    return make
