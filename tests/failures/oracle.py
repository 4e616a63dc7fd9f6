"""The output of a landmark model, computed one query at a time from its formulas.

No paging, no ops, no backend: whole sequences, attention in float64, a Python loop over queries,
nothing clever. Tests put an engine's log-probabilities beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cairn.attention.inputs import GqaInputs, HilsInputs
from cairn.engine.build import Built
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec
from cairn.specs.model import ModelSpec
from tests.specs import hils_of


def on_host(x: Tensor | None) -> Tensor | None:
    """The tensor in float64 on the host."""
    return None if x is None else x.cpu().double()


@dataclass
class OracleLayer:
    """One layer of an OracleBatch."""

    step: OracleBatch
    index: int

    @property
    def completed(self) -> Tensor:
        return self.step.completed

    def kv_target(self) -> None:
        return None

    def run(self, inputs: GqaInputs) -> Tensor:
        return self.step.attend(self.index, inputs)


@dataclass
class OracleBatch:
    """One sequence as a step of a model; both the step and its batch.

    Attributes:
        spec: the model.
        tokens: user tokens.
        topk, window, softmax1, strategy: of the landmark layers; strategy "hils" or one of the
            older three.
        landmark_layers: those that select pages; other landmark layers see their window alone.
        dense: landmark layers attend to every earlier user token instead.
        device: of the model; attention itself is computed on the CPU.
        selected: (layer, slot, KV head) -> the pages that were chosen.
        weights: (layer, slot, query head) -> their shares in that order, then the window's.
        margin: the least by which a page that was chosen scored more than one that was not, as a
            part of the largest score of that query and KV head, before what normalises it.
    """

    spec: ModelSpec
    tokens: Sequence[int]
    topk: int
    window: int
    softmax1: bool
    strategy: str
    landmark_layers: tuple[int, ...]
    dense: bool = False
    device: str = "cpu"
    selected: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    weights: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    margin: float = float("inf")
    inserted: None = None

    def __post_init__(self) -> None:
        self.size = self.spec.page_size or 1 << 30
        ids: list[int] = []
        positions: list[int] = []
        users: list[int] = []
        for number, token in enumerate(self.tokens):
            users.append(len(ids))
            ids.append(token)
            positions.append(number)
            if self.spec.landmarks and len(ids) % self.size == self.size - 1:
                ids.append(self.spec.landmark_id)
                positions.append(number + 1)
        at = self.device
        self.input_ids = torch.tensor(ids, device=at)
        self.positions = torch.tensor(positions, device=at)
        self.users = torch.tensor(users, device=at)
        slots = torch.arange(len(ids))
        self.last = slots % self.size == self.size - 1
        self.slot = slots.to(at)
        self.completed = slots[self.last].to(at)
        self.batch = self
        self.layers = [OracleLayer(self, i) for i in range(self.spec.num_layers)]

    def attend(self, layer: int, inputs: GqaInputs) -> Tensor:
        mixer, lmk_q, summary_query = self.spec.mixers[layer], None, None
        if isinstance(inputs, HilsInputs) and isinstance(mixer, HilsSpec):
            lmk_q, summary_query = inputs.lmk_q, inputs.summary_query
            if summary_query is None and mixer.needs_summary_query:
                summary_query = lmk_q[self.completed]
        given = (inputs.q, inputs.k, inputs.v, lmk_q, summary_query)
        return self._attend(layer, *map(on_host, given)).to(inputs.q)

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, mu: Tensor | None
    ) -> Tensor:
        kind = self.spec.mixers[layer]
        assert isinstance(kind, GqaSpec)
        group = q.shape[1] // k.shape[1]
        kh, vh = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if not isinstance(kind, HilsSpec) or self.dense:
            window = None if isinstance(kind, HilsSpec) else kind.window
            out = [self._plain(s, q, kh, vh, window, kind) for s in range(len(q))]
            return torch.stack(out)
        assert z is not None
        key, bias = self._summaries(kind, k, z, mu)
        out = []
        for s in range(len(q)):
            visible = self._window(s)
            a = torch.einsum("hd,thd->ht", q[s], kh[visible]) * q.shape[-1] ** -0.5
            lse = a.logsumexp(-1)
            o_window = torch.einsum("ht,thd->hd", a.softmax(-1), vh[visible])
            if layer not in self.landmark_layers:
                out.append(o_window)
                continue
            out.append(self._landmark(layer, s, (q, kh, vh), z, (key, bias), (lse, o_window)))
        return torch.stack(out)

    def _plain(self, s: int, q: Tensor, kh: Tensor, vh: Tensor, window, kind) -> Tensor:
        first = 0 if window is None else max(0, s - window + 1)
        visible = [t for t in range(first, s + 1) if not (kind.mask_landmarks and self.last[t])]
        if not visible:
            return torch.zeros_like(q[s])
        a = torch.einsum("hd,thd->ht", q[s], kh[visible]) * q.shape[-1] ** -0.5
        return torch.einsum("ht,thd->hd", a.softmax(-1), vh[visible])

    def _window(self, s: int) -> list[int]:
        first = max(0, (s - self.window + 1) // self.size * self.size)
        return [t for t in range(first, s + 1) if (t + 1) % self.size]

    def _summaries(
        self, hils: HilsSpec, k: Tensor, z: Tensor, mu: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Key [P, h_q, d] and bias [P, h_q] of every complete page."""
        pages, group = len(k) // self.size, z.shape[1] // k.shape[1]
        paged = k[: pages * self.size].unflatten(0, (pages, self.size))
        paged = paged.repeat_interleave(group, 2)
        if self.strategy != "hils" or hils.summary == "landmark":
            key, bias = paged[:, -1], None
        else:
            key, bias = paged.mean(1), None
        if self.strategy == "hils" and mu is not None:
            logits = torch.einsum("phd,pihd->phi", mu, paged[:, :-1]) * k.shape[-1] ** -0.5
            p = logits.softmax(-1)
            if hils.summary == "prior":
                key = torch.einsum("phi,pihd->phd", p, paged[:, :-1])
            bias = -(p * p.log()).nan_to_num(0.0).sum(-1)
        return key, bias

    def _landmark(self, layer, s, qkv, z, summary, window) -> Tensor:
        """Output [h_q, d] of the query at slot s."""
        (q, kh, vh), (key, bias), (lse, o_window) = qkv, summary, window
        heads, kv_heads = q.shape[1], self.spec.mixers[layer].num_kv_heads
        group, scale = heads // kv_heads, q.shape[-1] ** -0.5
        pages = max(0, (s - self.window + 1) // self.size)
        u = torch.einsum("hd,phd->hp", z[s], key[:pages]) * scale
        if bias is not None:
            u = u + bias[:pages].T
        out = torch.empty_like(o_window)
        for g in range(kv_heads):
            mine = slice(g * group, (g + 1) * group)
            score, logits, own = self._scores(u[mine], lse[mine])
            order = sorted((-value, j) for j, value in enumerate(score.tolist()))
            chosen = sorted(j for _, j in order[: self.topk])
            if pages > self.topk:
                margin = order[self.topk][0] - order[self.topk - 1][0]
                self.margin = min(self.margin, margin / max(float(u[mine].abs().max()), 1e-30))
            self.selected[layer, s, g] = chosen
            others = [own, torch.zeros_like(own)] if self.softmax1 else [own]
            w = torch.cat([logits[:, chosen], torch.stack(others, 1)], 1).softmax(1)
            for h, weights in zip(range(heads)[mine], w.tolist(), strict=True):
                self.weights[layer, s, h] = weights[: len(chosen) + 1]
            inside = torch.tensor(chosen, dtype=torch.int64)[:, None] * self.size
            inside = inside + torch.arange(self.size - 1)
            p = torch.einsum("hd,jihd->hji", q[s, mine], kh[:, mine][inside]) * scale
            pages_out = torch.einsum("hji,jihd->hjd", p.softmax(2), vh[:, mine][inside])
            of_pages, of_window = w[:, : len(chosen)], w[:, len(chosen), None]
            out[mine] = torch.einsum("hj,hjd->hd", of_pages, pages_out)
            out[mine] += of_window * o_window[mine]
        return out

    def _scores(self, u: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score [P] of a group's pages, and per head of the group the logits of pages and
        window."""
        if self.strategy == "group":
            # All heads of the group share the key, so this is its product with the summed query.
            total = u.sum(0)
            return total, total.expand_as(u), lse.logsumexp(0).expand_as(lse)
        score = u
        if self.strategy != "head":
            score = u - torch.logaddexp(lse, u.logsumexp(1))[:, None]
        best = score.amax(0) if u.shape[1] else u.new_empty(0)
        return best, u, lse


def oracle(built: Built, tokens: Sequence[int], **changes) -> tuple[np.ndarray, OracleBatch]:
    """Log-probabilities [len(tokens), V] after each token, with the engine's weights.

    Args:
        built: the engine whose model and resolved options count.
        tokens: user tokens.
        changes: attributes of `OracleBatch` to set otherwise.
    """
    config, spec = built.config, built.spec
    hils = hils_of(spec)
    assert hils is not None
    given = {
        "topk": hils.topk,
        "window": hils.window,
        "softmax1": hils.softmax1,
        "strategy": hils.strategy,
        "landmark_layers": spec.selecting_layers,
        "device": config.device,
    }
    batch = OracleBatch(spec, tokens, **{**given, **changes})
    model = built.runner.model
    with torch.inference_mode():
        logits = model.logits(model(batch)[batch.users])
        return torch.log_softmax(logits, -1).cpu().numpy(), batch
