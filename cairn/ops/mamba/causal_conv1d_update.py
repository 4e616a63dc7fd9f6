"""Causal convolution over the next few tokens of every sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, expect_within, refuse
from cairn.ops.mamba import convolution, launch
from cairn.ops.registry import op

NAME = "causal_conv1d_update"


@op(mutates=("x", "conv_state"))
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias_: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    pad_slot_id: int,
) -> None:
    """x becomes y_t = act(bias + sum over j < W of w[:, j] * x_{t - W + 1 + j}), in float32,
    rounded once; states are replaced by the last inputs of their sequences.

    Args:
        x: [B, D, L], changed. Float32, bfloat16 or float16.
        conv_state: [slots, D, S] with S >= W - 1, changed; the oldest input first.
        weight: [D, W].
        bias_: [D], or None.
        silu_activation: whether act is silu; otherwise the identity.
        cache_seqlens: [B] int32, the number p of earlier tokens: the state is then a ring buffer
            with input i at i mod S, and L <= S - W + 1, so that no input is overwritten before a
            later token reads it. None: the state is shifted by L.
        conv_state_indices: [B] int32, slots. A negative slot: the sequence starts from zeros and
            stores nothing. None: sequence n has slot n.
        pad_slot_id: sequences with this slot are skipped.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    batch, _, tokens = x.shape
    slot = conv_state_indices
    if slot is None:
        slot = torch.arange(batch, device=x.device)
    if not batch:
        return
    before = convolution.read_state(conv_state, slot, slot >= 0)
    kept = (slot >= 0) & (slot != pad_slot_id)
    reach, size = weight.shape[1] - 1, conv_state.shape[2]
    if cache_seqlens is None:
        window = torch.cat((before[..., size - reach :], x.to(before.dtype)), dim=-1)
        after = torch.cat((before, x.to(before.dtype)), dim=-1)[..., tokens:]
    else:
        # Column of input p - W + 1 + j: negative for inputs in the state, else of the new tokens.
        column = torch.arange(-reach, tokens, device=x.device)
        place = (cache_seqlens.long()[:, None] + column).remainder(max(1, size))
        place = place[:, None].expand(-1, x.shape[1], -1)
        held = before.gather(2, place[..., :reach])
        window = torch.cat((held, x.to(before.dtype)), dim=-1)
        after = before.scatter(2, place[..., reach:], x.to(before.dtype)) if size else before
    y = convolution.convolve(window, weight, bias_, silu_activation)
    live = (slot != pad_slot_id)[:, None, None]
    x.copy_(torch.where(live, y, x.float()))
    conv_state[slot[kept].long()] = after[kept]


@causal_conv1d_update.check
def _(call: Call) -> None:
    convolution.expect_weights(NAME, ("weight", "bias_"), call.weight, call.bias_)
    expect(NAME, "x", call.x, (None, call.weight.shape[0], None), FLOATS, call.weight)
    expect(NAME, "conv_state", call.conv_state, 3, FLOATS, call.weight)
    convolution.expect_states(NAME, "conv_state", call.conv_state, call.weight)
    slots = call.conv_state_indices
    convolution.expect_slots(
        NAME, "conv_state_indices", slots, call.x.shape[0], call.conv_state, call.weight
    )
    if call.cache_seqlens is not None:
        expect(NAME, "cache_seqlens", call.cache_seqlens, call.x.shape[:1], INT32, call.weight)
        expect_within(NAME, "cache_seqlens", call.cache_seqlens, 1 << 31)
        room = call.conv_state.shape[2] - call.weight.shape[1] + 1
        if call.x.shape[2] > max(1, room):
            problem = (
                f"has {call.x.shape[2]} tokens: a ring of {call.conv_state.shape[2]} takes {room}"
            )
            refuse(NAME, "x", problem, "Give longer states, or fewer tokens")
    if not isinstance(call.pad_slot_id, int):
        refuse(NAME, "pad_slot_id", f"is {call.pad_slot_id!r}, not an integer")


@causal_conv1d_update.implementation("triton", devices=gpu.DEVICES)
def _(call: Call) -> None:
    batch, _, tokens = call.x.shape
    of = launch.Sequences(batch, tokens, None, call.conv_state_indices)
    by = launch.Convolution(call.weight, call.bias_, call.silu_activation, call.pad_slot_id)
    launch.convolve_each(call.x, by, call.conv_state, of, call.x, ring=call.cache_seqlens)
