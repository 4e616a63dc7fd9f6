"""Sampling from rows of probabilities, with optional filters."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, expect
from cairn.ops.registry import op
from cairn.ops.sampling import arguments, launch
from cairn.ops.sampling.min_p_renorm_probs import min_p_renorm_probs
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm


@op
def draw_from_probs(
    probs: Tensor,
    uniform: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    indices: Tensor | None = None,
    joint: bool = False,
) -> Tensor:
    """Inverse transform sampling: the first token, in vocabulary order, at which the cumulative sum
    of the filtered probabilities exceeds uniform * (their sum).

    Sums are in float64. Tokens of probability 0 are never drawn. Rows whose sum is zero, infinite
    or NaN give -1.

    Args:
        probs: [B, V] float32 >= 0, not necessarily normalised.
        uniform: [N] float32 in [0, 1).
        top_k, top_p, min_p: [B], as in top_k_renorm_probs, top_p_renorm_probs and
            min_p_renorm_probs, applied in this order; None: no such filter.
        indices: [N] int32 or int64, the row of each output; None: all, in order (N = B).
        joint: top-p uses the probabilities before top-k, not after it.
    Returns:
        [N] int32.
    """
    rows = _filtered(probs, top_k, top_p, min_p, joint)
    # Check the whole row, not the kept part: a filter drops NaN.
    finite = probs.amax(dim=-1, keepdim=True).isfinite()
    running = rows.double().cumsum(dim=-1)
    mass = running[:, -1:]
    drawable = finite & (mass > 0)
    if indices is None:
        token = torch.searchsorted(running, uniform.double()[:, None] * mass, right=True)
        return torch.where(drawable, token, -1).squeeze(-1).to(torch.int32)
    row = indices.long()
    token = _first_above(running, row, uniform.double() * mass[row, 0])
    return torch.where(drawable[row, 0], token, -1).to(torch.int32)


def _first_above(running: Tensor, row: Tensor, bound: Tensor) -> Tensor:
    """First index at which the cumulative sums running[row] exceed bound; row, bound [N], running
    [B, V]. Bisection: copying a row for each of N >> B draws would take too much memory."""
    low = torch.zeros_like(row)
    high = torch.full_like(row, running.shape[1])
    for _ in range(running.shape[1].bit_length()):
        middle = (low + high) // 2
        above = running[row, middle.clamp(max=running.shape[1] - 1)] > bound
        high = torch.where(above, middle, high)
        low = torch.where(above | (low == high), low, middle + 1)
    return high


def _filtered(
    probs: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, joint: bool
) -> Tensor:
    if joint and top_p is not None:
        probs, top_p = top_p_renorm(probs, top_p), None
    if top_k is not None:
        probs = top_k_renorm(probs, top_k)
    if top_p is not None:
        probs = top_p_renorm(probs, top_p)
    return probs if min_p is None else min_p_renorm_probs(probs, min_p)


@draw_from_probs.check
def _(call: Call) -> None:
    name = "draw_from_probs"
    arguments.check_rows(name, "probs", call.probs, (torch.float32,))
    arguments.check_filters(name, call.probs, call.top_k, call.top_p, call.min_p)
    if call.indices is not None:
        expect(name, "indices", call.indices, (None,), INDICES, like=call.probs)
    count = call.probs.shape[:1] if call.indices is None else call.indices.shape
    expect(name, "uniform", call.uniform, count, (torch.float32,), like=call.probs)


def _accepts(call: Call) -> bool:
    given = [p for p in (call.top_k, call.top_p, call.min_p) if p is not None]
    if call.indices is None:
        return launch.accepts(call.probs, call.uniform, *given)
    near = call.uniform.is_contiguous() and call.indices.is_contiguous()
    near = near and len(call.probs) <= launch.MAX_ROWS
    return near and launch.accepts(call.probs, *given)


@draw_from_probs.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> Tensor:
    """Search the filters' thresholds instead of sorting rows."""
    filters = launch.Filters(call.top_k, call.top_p, call.min_p, call.joint)
    if call.indices is None:
        return launch.draw(launch.Source(call.probs), filters, None, call.uniform, torch.int32)
    kept = launch.Source(call.probs if filters.none else launch.filter_probs(call.probs, filters))
    return launch.draw_from(kept, call.indices, call.uniform)
