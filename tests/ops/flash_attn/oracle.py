"""Reference attention in float64, one query at a time, with FlashAttention's documented masks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rules:
    """Mask and score modifications of a query; -1, 0 and None: off."""

    scale: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0

    def sees(self, place: int, key: int) -> bool:
        left, right = self.window
        return not (
            (self.causal and key > place)
            or (left >= 0 and key < place - left)
            or (right >= 0 and key > place + right)
            or (self.chunk and math.floor(key / self.chunk) != math.floor(place / self.chunk))
        )

    def one(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        place: int,
        sink: float | None = None,
        qv: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """out [dv] and lse of one query head [d] over keys [n, d], values [n, dv]."""
        logits, seen = [], [j for j in range(len(keys)) if self.sees(place, j)]
        for j in seen:
            score = float(q.double() @ keys[j].double())
            if qv is not None:
                score += float(qv.double() @ values[j].double())
            score *= self.scale
            if self.softcap:
                score = self.softcap * math.tanh(score / self.softcap)
            logits.append(score)
        if not seen:
            return torch.zeros(values.shape[1], dtype=torch.float64), math.inf
        top = max(logits)
        terms = [math.exp(x - top) for x in logits]
        lse = top + math.log(sum(terms))
        total = sum(terms) + (0.0 if sink is None else math.exp(sink - top))
        out = sum(t * values[j].double() for t, j in zip(terms, seen, strict=True))
        return out / total, lse


def attention(
    rules: Rules,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None = None,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [m, H, dv] and lse [H, m] of a sequence's queries [m, H, d]; keys [n, Hk, d]."""
    many, heads, _ = q.shape
    group = heads // keys.shape[1]
    out = torch.zeros(many, heads, values.shape[2], dtype=torch.float64)
    lse = torch.zeros(heads, many, dtype=torch.float64)
    for i in range(many):
        for h in range(heads):
            out[i, h], lse[h, i] = rules.one(
                *(q[i, h], keys[:, h // group], values[:, h // group]),
                i + len(keys) - many,
                None if sinks is None else float(sinks[h]),
                None if qv is None else qv[i, h],
            )
    return out, lse


def rotated(x: Tensor, position: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """A vector [.., d] rotated as complex numbers."""
    half = cos.shape[1]
    pairs = [(2 * j, 2 * j + 1) if interleaved else (j, j + half) for j in range(half)]
    out = x.double().clone()
    for j, (a, b) in enumerate(pairs):
        factor = torch.complex(cos[position, j].double(), sin[position, j].double())
        number = torch.complex(x[..., a].double(), x[..., b].double()) * factor
        out[..., a], out[..., b] = number.real, number.imag
    return out
