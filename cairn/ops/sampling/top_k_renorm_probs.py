"""Top-k filter of probabilities (Fan et al. 2018, section 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES
from cairn.ops.registry import op
from cairn.ops.sampling import arguments, launch
from cairn.ops.sampling.renormalised import renormalised

NAME = "top_k_renorm_probs"


@op
def top_k_renorm(probs: Tensor, top_k: Tensor) -> Tensor:
    """top_k_renorm_probs with a tensor of k.

    Args:
        probs: [B, V] float32, finite and not negative.
        top_k: [B] int32 or int64; k < 1 or k >= V keeps all.
    Returns:
        [B, V] float32.
    """
    vocabulary = probs.shape[-1]
    k = torch.where(top_k < 1, vocabulary, top_k).clamp_max(vocabulary).long()
    ordered = probs.sort(dim=-1, descending=True).values
    return renormalised(probs, probs >= ordered.gather(-1, k[:, None] - 1))


@top_k_renorm.check
def _(call: Call) -> None:
    arguments.check_rows(NAME, "probs", call.probs, (torch.float32,))
    arguments.check_parameter(NAME, "top_k", call.top_k, call.probs, INDICES)


@top_k_renorm.front(replayed=True)
def top_k_renorm_probs(
    probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False
) -> Tensor:
    """Keep the k most probable tokens of each row and divide by their sum.

    Tokens as probable as the k-th are all kept.

    Args:
        probs: [B, V] float32 (or half precision, taken as float32), finite and not negative.
        top_k: a number, or [B] int32 or int64; k < 1 or k >= V keeps all.
        is_deterministic: ignored: it always is.
    Returns:
        [B, V] float32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    arguments.check_rows(NAME, "probs", probs, FLOATS)
    return top_k_renorm(probs.float(), arguments.counts(NAME, "top_k", top_k, probs))


top_k_renorm_prob = top_k_renorm_probs
"""Alias, as in sgl-kernel."""


@top_k_renorm.implementation("head", devices=("cpu",))
def _(call: Call) -> Tensor:
    """Sort only as many tokens of each row as the largest k of the batch needs."""
    limited = (call.top_k >= 1) & (call.top_k < call.probs.shape[-1])
    k = torch.where(limited, call.top_k, 1).long()
    longest = int(k.max()) if k.numel() else 1
    threshold = call.probs.topk(longest, dim=-1).values.gather(-1, k[:, None] - 1)
    return renormalised(call.probs, (call.probs >= threshold) | ~limited[:, None])


@top_k_renorm.implementation("triton", devices=gpu.DEVICES, when=launch.takes, replayed=True)
def _(call: Call) -> Tensor:
    return launch.filter_probs(call.probs, launch.Filters(top_k=call.top_k))
