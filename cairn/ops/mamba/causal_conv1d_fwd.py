"""Causal convolution over whole sequences, or over their next tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.mamba import convolution, launch, segments
from cairn.ops.registry import op

NAME = "causal_conv1d_fwd"


@op(mutates=("x", "conv_states"))
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias_: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    silu_activation: bool,
    pad_slot_id: int,
) -> None:
    """x becomes y_t = act(bias + sum over j < W of w[:, j] * x_{t - W + 1 + j}), in float32,
    rounded once; states are replaced by the last inputs of their sequences.

    The inputs before the first token are those in the sequence's slot, or zeros. Sequences may be
    shorter than W - 1, or empty: the state is then shifted by their length.

    Args:
        x: [B, D, L], or [D, T] of concatenated sequences, changed. Float32, bfloat16 or float16.
        weight: [D, W].
        bias_: [D], or None.
        conv_states: [slots, D, S] with S >= W - 1, changed; the oldest input first. None: all
            start from zeros and nothing is stored.
        query_start_loc: [N + 1] int32: sequence n has tokens query_start_loc[n] ..
            query_start_loc[n + 1] - 1; tokens after the last sequence are not changed. None: x is
            [B, D, L].
        cache_indices: [N] int32, the slot of each sequence. A negative slot: the sequence starts
            from zeros and stores nothing. None: sequence n has slot n.
        has_initial_state: [N] bool; False: the sequence starts from zeros, whatever its slot holds.
            None: all start from zeros.
        silu_activation: whether act is silu; otherwise the identity.
        pad_slot_id: sequences with this slot are skipped, and the slot is not changed.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    flat = x if x.dim() == 2 else x.transpose(0, 1).flatten(1)
    starts = query_start_loc
    if starts is None:
        starts = segments.regular(x.shape[0], x.shape[2], x.device)
    y = convolution.ragged(
        flat,
        weight,
        bias_,
        conv_states,
        starts,
        cache_indices,
        has_initial_state,
        silu_activation,
        pad_slot_id,
    )
    x.copy_(y if x.dim() == 2 else y.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1))


@causal_conv1d_fwd.check
def _(call: Call) -> None:
    convolution.expect_weights(NAME, ("weight", "bias_"), call.weight, call.bias_)
    channels = call.weight.shape[0]
    if call.query_start_loc is None:
        expect(NAME, "x", call.x, (None, channels, None), FLOATS, call.weight)
        count = call.x.shape[0]
    else:
        expect(NAME, "x", call.x, (channels, None), FLOATS, call.weight)
        expect(NAME, "query_start_loc", call.query_start_loc, 1, INT32, call.weight)
        segments.expect_starts(
            NAME, "query_start_loc", call.query_start_loc, call.x.shape[1], call.weight
        )
        count = call.query_start_loc.shape[0] - 1
    convolution.expect_states(NAME, "conv_states", call.conv_states, call.weight)
    convolution.expect_slots(
        NAME, "cache_indices", call.cache_indices, count, call.conv_states, call.weight
    )
    if call.has_initial_state is not None:
        kinds = (torch.bool,)
        expect(NAME, "has_initial_state", call.has_initial_state, (count,), kinds, call.weight)
    if not isinstance(call.pad_slot_id, int):
        refuse(NAME, "pad_slot_id", f"is {call.pad_slot_id!r}, not an integer")


@causal_conv1d_fwd.implementation("triton", devices=gpu.DEVICES)
def _(call: Call) -> None:
    """Two passes: convolve tokens into other memory, then update states. In one pass in place, a
    program could overwrite inputs that another still has to read."""
    x, starts, states = call.x, call.query_start_loc, call.conv_states
    flat = x if x.dim() == 2 else x.transpose(0, 1).flatten(1)
    count = x.shape[0] if starts is None else starts.shape[0] - 1
    used = call.has_initial_state
    if used is None:
        used = torch.zeros(count, dtype=torch.bool, device=x.device)
    length = x.shape[-1]
    of = launch.Sequences(count, length, starts, call.cache_indices, has_initial_state=used)
    by = launch.Convolution(call.weight, call.bias_, call.silu_activation, call.pad_slot_id)
    # The kernel reads whole tokens, so the channels of a token must be contiguous.
    rows = flat.t().contiguous()
    y = torch.empty_like(rows).t()
    launch.convolve(rows.t(), by, states, of, y)
    if states is not None:
        launch.convolve_each(x, by, states, of, None)
    if starts is not None:
        behind = torch.arange(length, device=x.device) >= starts[-1]
        y = torch.where(behind, x, y)
    x.copy_(y if x.dim() == 2 else y.unflatten(1, (count, length)).transpose(0, 1))
