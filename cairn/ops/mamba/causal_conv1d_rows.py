"""Causal convolution over the rows of a step, out of place."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, check_min, expect, expect_within
from cairn.ops.mamba import convolution, launch, segments
from cairn.ops.mamba.recurrence import FEW
from cairn.ops.registry import op

NAME = "causal_conv1d_rows"


@op(mutates=("conv_states",))
def causal_conv1d_rows(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    starts: Tensor,
    slots: Tensor,
    stored: Tensor,
    has_initial_state: Tensor,
    longest: int,
) -> Tensor:
    """silu(sum over j < W of w[:, j] * x_{t - W + 1 + j}), as `causal_conv1d_fwd` of concatenated
    sequences.

    Args:
        x: [T, D] float32, bfloat16 or float16.
        weight: [D, W].
        conv_states: [slots, D, S] with S >= W - 1, changed; the oldest input first.
        starts: [N + 1] int32: sequence n has tokens starts[n] .. starts[n + 1] - 1.
        slots: [N] int32, slots of the inputs before each sequence's tokens; negative: zeros.
        stored: [N] int32, slots to which each sequence's last inputs are written; negative: they
            are not.
        has_initial_state: [N] bool; False: the inputs before its tokens are 0, whatever its slot
            holds.
        longest: an upper bound of the sequences' lengths.
    Returns:
        [T, D] of x's dtype; 0 after the last sequence.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    y = convolution.ragged(
        x.t(), weight, None, conv_states, starts, slots, has_initial_state, True, None, stored
    )
    behind = torch.arange(len(x), device=x.device) >= starts[-1]
    return torch.where(behind[:, None], 0, y.t()).to(x.dtype)


@causal_conv1d_rows.fake
def _(call: Call) -> Tensor:
    return torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)


@causal_conv1d_rows.check
def _(call: Call) -> None:
    convolution.expect_weights(NAME, ("weight", "bias"), call.weight, None)
    expect(NAME, "x", call.x, (None, call.weight.shape[0]), FLOATS, call.weight)
    convolution.expect_states(NAME, "conv_states", call.conv_states, call.weight)
    expect_rows(NAME, call, call.conv_states.shape[0], len(call.x))


def expect_rows(op: str, call: Call, held: int, tokens: int) -> None:
    """Raise BadArgument unless the arguments that describe a call's sequences are consistent."""
    expect(op, "starts", call.starts, 1, INT32, call.weight if op == NAME else call.q)
    segments.expect_starts(op, "starts", call.starts, tokens, call.starts)
    count = call.starts.shape[0] - 1
    for name, given in (("slots", call.slots), ("stored", call.stored)):
        expect(op, name, given, (count,), INT32, call.starts)
        expect_within(op, name, given, held, None)
    expect(op, "has_initial_state", call.has_initial_state, (count,), (torch.bool,), call.starts)
    check_min(op, "longest", call.longest, 0)


@causal_conv1d_rows.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> Tensor:
    x, count = call.x, len(call.slots)
    if not count:
        return gpu.zeros(x.shape, x.dtype, x.device)
    out = gpu.empty(x.shape, x.dtype, x.device)
    of = launch.Sequences(
        count,
        0,
        call.starts,
        call.slots,
        stored=call.stored,
        has_initial_state=call.has_initial_state,
    )
    by = launch.Convolution(call.weight, None, True)
    if call.longest <= FEW:
        launch.convolve_each(x.t(), by, call.conv_states, of, out.t(), tokens=len(x))
    else:
        launch.convolve(x.t(), by, call.conv_states, of, out.t())
        launch.convolve_each(x.t(), by, call.conv_states, of, None)
    return out
