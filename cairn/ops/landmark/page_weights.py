"""Softmax weights of the selected pages and of the window."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, expect
from cairn.ops.landmark import loops
from cairn.ops.landmark.kernels.summary import page_weights_kernel
from cairn.ops.registry import op


@op
def page_weights(scores: Tensor, lse: Tensor, softmax1: bool) -> tuple[Tensor, Tensor]:
    """Softmax over the selected pages' scores, the window's lse and, with softmax1, a zero.

    Args:
        scores: [T, h, K] float32, -inf where no page is selected.
        lse: [T, h] float32, -inf for an empty window.
        softmax1: add a logit of 0 whose weight is dropped.
    Returns:
        (weights [T, h, K], window_weight [T, h]) float32; all 0 if there is neither a page nor a
        window.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    logits = [scores, lse.unsqueeze(-1)]
    if softmax1:
        logits.append(torch.zeros_like(logits[1]))
    joined = torch.cat(logits, dim=-1)
    weights = torch.softmax(joined, dim=-1)
    if not softmax1:
        empty = (joined == -torch.inf).all(dim=-1, keepdim=True)
        weights = weights.masked_fill_(empty, 0.0)
    topk = scores.shape[-1]
    return weights[..., :topk].clone(), weights[..., topk].clone()


@page_weights.check
def _(call: Call) -> None:
    expect("page_weights", "scores", call.scores, 3, FLOAT32)
    expect("page_weights", "lse", call.lse, call.scores.shape[:2], FLOAT32, call.scores)


@page_weights.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.scores.is_contiguous() and call.lse.is_contiguous(),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    weights, window_weight = (
        gpu.empty(x.shape, x.dtype, x.device) for x in (call.scores, call.lse)
    )
    topk = call.scores.shape[-1]
    width = gpu.next_power_of_2(max(1, topk))
    per_program = max(1, 2048 // width)
    if call.lse.numel():
        page_weights_kernel[(-(-call.lse.numel() // per_program),)](
            scores=call.scores,
            lse=call.lse,
            weights=weights,
            window_weight=window_weight,
            lines=call.lse.numel(),
            topk=topk,
            SOFTMAX1=call.softmax1,
            LINES=per_program,
            K=width,
            num_warps=4,
        )
    return weights, window_weight


@page_weights.implementation(
    "numba",
    devices=cpu.DEVICES,
    when=lambda call: call.scores.is_contiguous() and call.lse.is_contiguous(),
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    weights, window_weight = torch.empty_like(call.scores), torch.empty_like(call.lse)
    loops.page_weights(
        *map(cpu.as_array, (call.scores.flatten(0, 1), call.lse.flatten())),
        bool(call.softmax1),
        *map(cpu.as_array, (weights.flatten(0, 1), window_weight.flatten())),
    )
    return weights, window_weight


def shared_weights(scores: Tensor, lse: Tensor, softmax1: bool) -> tuple[Tensor, Tensor]:
    """page_weights for scores that a KV head's query heads may share.

    Args:
        scores: [T, h_q or h_kv, K]; lse: [T, h_q].
    Returns:
        (weights [T, h_q, K], window_weight [T, h_q]): with scores of KV heads, one softmax per
        group, with the window's mass summed over the group.
    """
    group = lse.shape[1] // max(1, scores.shape[1])
    if group <= 1:
        return page_weights(scores, lse, softmax1)
    mass = torch.logsumexp(lse.unflatten(1, (-1, group)), dim=2)
    weights, window_weight = page_weights(scores, mass, softmax1)
    return weights.repeat_interleave(group, 1), window_weight.repeat_interleave(group, 1)
