"""Launch of the router kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.moe.kernels.routing import routing_kernel
from cairn.ops.pdl import uses_pdl

MAX_EXPERTS = 4096
MAX_CHOSEN = 64
EXPERTS_A_WARP = 512


@dataclass(frozen=True, slots=True)
class Rule:
    """How a token's experts are chosen and weighted; see `routing_kernel`.

    Attributes:
        score: "softmax", "sigmoid" or "sqrtsoftplus".
        cap: soft cap of the router's output; 0: none.
        rounded: scores have the dtype of the router's output.
        groups, kept, best: number of groups, number of groups kept, and experts that a group is
            ranked by.
        shared: number of shared experts.
        share: a shared expert's weight is the sum of weights divided by this; None: it is 1, or
            sigmoid of a gate.
        renormalize, floor, factor: weights are divided by their sum + floor, times factor.
    """

    score: str
    cap: float = 0.0
    rounded: bool = False
    groups: int = 1
    kept: int = 1
    best: int = 2
    shared: int = 0
    share: float | None = None
    renormalize: bool = False
    floor: float = 0.0
    factor: float = 1.0


def accepts(gating: Tensor, *vectors: Tensor | None, topk: int) -> bool:
    """Whether the kernel can read gating [T, E] and the biases."""
    near = gating.stride(1) == 1 and gating.shape[1] <= MAX_EXPERTS and topk <= MAX_CHOSEN
    return near and all(x is None or x.is_contiguous() for x in vectors)


def takes_outputs(gating: Tensor, bias: Tensor | None, weights: Tensor, ids: Tensor) -> bool:
    """`accepts`, and outputs [T, k] with contiguous rows."""
    near = weights.stride(1) == 1 and ids.stride(1) == 1
    return near and accepts(gating, bias, topk=ids.shape[1])


def route(
    gating: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    rule: Rule,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write weights [T, k] float32 and ids [T, k] int32 of the experts chosen from gating [T, E]; k
    includes the shared experts, and gate [T, 1] is for them."""
    tokens, experts = gating.shape
    slots = ids.shape[1]
    if not tokens or not slots:
        return weights, ids
    size = experts // rule.groups
    best = min(rule.best, size) if rule.kept < rule.groups else 0
    padded = gpu.next_power_of_2(rule.groups), gpu.next_power_of_2(size)
    warps = max(1, min(8, padded[0] * padded[1] // EXPERTS_A_WARP))
    pdl = uses_pdl(gating.device, tokens, warps)
    routing_kernel[(tokens,)](
        gating=gating,
        bias=bias,
        gate=gate,
        weights=weights,
        ids=ids,
        gating_stride=gating.stride(0),
        gate_stride=0 if gate is None else gate.stride(0),
        weights_stride=weights.stride(0),
        ids_stride=ids.stride(0),
        experts=experts,
        size=size,
        kept=rule.kept,
        topk=slots - rule.shared,
        shared=rule.shared,
        cap=float(rule.cap),
        share=float(rule.share or 1.0),
        floor=float(rule.floor),
        factor=float(rule.factor),
        G=padded[0],
        S=padded[1],
        KP=gpu.next_power_of_2(slots),
        SCORE=rule.score,
        CAPPED=bool(rule.cap),
        BEST=best,
        ROUNDED=rule.rounded,
        RENORMALIZE=rule.renormalize,
        WHOLE=rule.shared > 0 and rule.share is None,
        PDL=pdl,
        num_warps=warps,
    )
    return weights, ids


def chosen(
    gating: Tensor, bias: Tensor | None, slots: int, rule: Rule, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route` into new tensors."""
    shape = (gating.shape[0], slots)
    weights = gpu.empty(shape, torch.float32, gating.device)
    ids = gpu.empty(shape, torch.int32, gating.device)
    return route(gating, bias, weights, ids, rule, gate)
