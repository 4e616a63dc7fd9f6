"""Nucleus filter of probabilities (Holtzman et al. 2020, equation 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS
from cairn.ops.registry import op
from cairn.ops.sampling import arguments, launch
from cairn.ops.sampling.renormalised import renormalised

NAME = "top_p_renorm_probs"
FIRST_HEAD = 256
HEAD_GROWTH = 16


@op
def top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    """top_p_renorm_probs with a tensor of p.

    Args:
        probs: [B, V] float32, rows that sum to 1.
        top_p: [B] float32; p >= 1 keeps all.
    Returns:
        [B, V] float32.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().cumsum(dim=-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept[:, :1] = True
    return renormalised(probs, torch.zeros_like(kept).scatter(-1, order, kept))


@top_p_renorm.check
def _(call: Call) -> None:
    arguments.check_rows(NAME, "probs", call.probs, (torch.float32,))
    arguments.check_parameter(NAME, "top_p", call.top_p, call.probs, (torch.float32,))


@top_p_renorm.front(replayed=True)
def top_p_renorm_probs(
    probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False
) -> Tensor:
    """Keep the most probable tokens of each row until their mass reaches p; divide by their sum.

    In descending order (equal probabilities: the lower token first) a token is kept while the mass
    before it, summed in float64, is below p. The first is always kept.

    Args:
        probs: [B, V] float32 (or half precision, taken as float32), rows that sum to 1.
        top_p: a number, or [B] of them; p >= 1 keeps all.
        is_deterministic: ignored: it always is.
    Returns:
        [B, V] float32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    arguments.check_rows(NAME, "probs", probs, FLOATS)
    return top_p_renorm(probs.float(), arguments.shares(NAME, "top_p", top_p, probs))


top_p_renorm_prob = top_p_renorm_probs
"""Alias, as in sgl-kernel."""


@top_p_renorm.implementation("head", devices=("cpu",))
def _(call: Call) -> Tensor:
    """Sort only as many tokens of each row as reach p. The sums, and so the kept tokens, are equal
    to the definition's."""
    last, count = _last_kept(call)
    keep = call.probs >= last
    surplus = keep.sum(-1) - count
    if bool((surplus > 0).any()):
        tied = call.probs == last
        room = tied.sum(-1) - surplus
        keep &= ~tied | (tied.cumsum(-1) <= room[:, None])
    return renormalised(call.probs, keep)


def _last_kept(call: Call) -> tuple[Tensor, Tensor]:
    """The smallest probability kept [B, 1] and how many tokens are kept [B]."""
    rows, vocabulary = call.probs.shape
    last = call.probs.new_full((rows, 1), -1.0)
    count = torch.full((rows,), vocabulary, device=call.probs.device)
    pending = (call.top_p < 1).nonzero().flatten()
    size = FIRST_HEAD
    while pending.numel():
        size = min(size, vocabulary)
        part = call.probs if pending.numel() == rows else call.probs[pending]
        head = part.topk(size, dim=-1).values
        mass = head.double().cumsum(dim=-1)
        p = call.top_p[pending, None]
        below = (mass[:, : vocabulary - 1] < p).sum(-1)
        done = (mass[:, -1] >= p[:, 0]) if size < vocabulary else torch.ones_like(below).bool()
        found = pending[done]
        count[found] = below[done] + 1
        last[found] = head[done].gather(-1, below[done, None])
        pending = pending[~done]
        size *= HEAD_GROWTH
    return last, count


@top_p_renorm.implementation("triton", devices=gpu.DEVICES, when=launch.takes, replayed=True)
def _(call: Call) -> Tensor:
    return launch.filter_probs(call.probs, launch.Filters(top_p=call.top_p))
