"""Merge of two attention results over disjoint keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.merge_kernels import merge_states_kernel
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.registry import op

_BLOCK = 4096


def merged(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, base2: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition, into new tensors; arguments and results as in `merge_state_v2`."""
    a, b = (s.masked_fill(s.isinf(), -torch.inf) for s in (s_a, s_b))
    add, power = (torch.logaddexp2, torch.exp2) if base2 else (torch.logaddexp, torch.exp)
    total = add(a, b)
    shift = total.clamp(min=torch.finfo(torch.float32).min)
    parts = [
        torch.where(s.isinf().unsqueeze(-1), 0.0, v.float()) * power(s - shift).unsqueeze(-1)
        for v, s in ((v_a, a), (v_b, b))
    ]
    return (parts[0] + parts[1]).to(v_a.dtype), total


@op(mutates=("v_merged", "s_merged"))
def merge_states(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor,
    s_merged: Tensor,
    base2: bool = False,
) -> None:
    """Write what `merge_state_v2` returns, or with base2 `merge_state`. A part may be written to.

    Args:
        v_a, v_b, v_merged: [n, h, d], one dtype.
        s_a, s_b, s_merged: [n, h] float32, contiguous.
        base2: s holds base-2 logarithms.
    """
    v, s = merged(v_a, s_a, v_b, s_b, base2)
    v_merged.copy_(v)
    s_merged.copy_(s)


@merge_states.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    lines, dim = call.s_a.numel(), call.v_a.shape[-1]
    if call.v_a.numel():
        width = gpu.next_power_of_2(dim)
        # With few lines, use fewer lines per program, so that there are at least 512 programs.
        rows = min(max(1, _BLOCK // width), gpu.next_power_of_2(-(-lines // 512)))
        merge_states_kernel[(-(-lines // rows),)](
            v_a=call.v_a,
            s_a=call.s_a,
            v_b=call.v_b,
            s_b=call.s_b,
            v=call.v_merged,
            s=call.s_merged,
            lines=lines,
            DIM=dim,
            DP=width,
            ROWS=rows,
            BASE2=call.base2,
            num_warps=gpu.warps_for(rows * width),
        )


@merge_states.front(replayed=True)
def merge_state_v2(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of two results with weights e^s; in float32, v rounded once.

    v = (e^s_a v_a + e^s_b v_b) / (e^s_a + e^s_b), s = ln(e^s_a + e^s_b).

    Args:
        v_a, v_b: [n, h, d] float32, bfloat16 or float16, contiguous.
        s_a, s_b: [n, h] float32, log-sum-exp (natural logarithm) of the logits behind v. Infinite:
            no key; that part's v is ignored. Both empty: v = 0, s = -inf.
        v_merged, s_merged: of the same shapes and dtypes, written and returned; None: new tensors.
            They may be v_a and s_a, or v_b and s_b.
    Returns:
        (v [n, h, d], s [n, h] float32).
    Raises:
        BadArgument: for another shape, dtype, device or stride.
    """
    return _merge("merge_state_v2", False, v_a, s_a, v_b, s_b, v_merged, s_merged)


@merge_states.front(replayed=True)
def merge_state(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge_state_v2` for log-sum-exp to base 2: weights 2^s, s = log2(2^s_a + 2^s_b)."""
    return _merge("merge_state", True, v_a, s_a, v_b, s_b, v_merged, s_merged)


def _merge(
    name: str,
    base2: bool,
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None,
    s_merged: Tensor | None,
) -> tuple[Tensor, Tensor]:
    expect(name, "v_a", v_a, (None, None, None), FLOATS, dense=-1)
    v = gpu.empty(v_a.shape, v_a.dtype, v_a.device) if v_merged is None else v_merged
    s = gpu.empty(s_a.shape, s_a.dtype, s_a.device) if s_merged is None else s_merged
    for what, tensor in (("v_b", v_b), ("v_merged", v)):
        expect(name, what, tensor, v_a.shape, (v_a.dtype,), v_a, dense=-1)
    for what, tensor in (("s_a", s_a), ("s_b", s_b), ("s_merged", s)):
        expect(name, what, tensor, v_a.shape[:2], (torch.float32,), v_a, dense=-1)
    merge_states(v_a, s_a, v_b, s_b, v, s, base2)
    return v, s
