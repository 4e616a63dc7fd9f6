"""Causal convolution out of place, with the arguments of sgl-kernel's CPU back end."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.mamba import convolution, segments
from cairn.ops.mamba.causal_conv1d_update import causal_conv1d_update
from cairn.ops.registry import op

PAD = -1
"""Slot of padding sequences, which are skipped."""


@op(mutates=("conv_states",))
def causal_conv1d_fn_cpu(
    mixed_qkv_transposed: Tensor,
    conv_weights: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor | None,
    has_initial_state: Tensor | None,
    cache_indices: Tensor | None,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int] | None,
) -> Tensor:
    """`causal_conv1d_fwd` of concatenated sequences, into a new tensor; the states are changed.

    Args:
        mixed_qkv_transposed: [D, T] float32, bfloat16 or float16.
        conv_weights, bias: [D, W]; [D] or None.
        activation: "silu", or None.
        conv_states: [slots, D, S], S >= W - 1, or None, changed.
        has_initial_state, cache_indices, query_start_loc: [N] bool, [N] and [N + 1] int32, as in
            `causal_conv1d_fwd`. Slot -1: the sequence is skipped.
        seq_lens_cpu: ignored.
    Returns:
        [D, T] of the input's dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    y = convolution.ragged(
        mixed_qkv_transposed,
        conv_weights,
        bias,
        conv_states,
        query_start_loc,
        cache_indices,
        has_initial_state,
        activation == "silu",
        PAD,
    )
    return y.to(mixed_qkv_transposed.dtype)


@op(mutates=("conv_states",))
def causal_conv1d_update_cpu(
    mixed_qkv: Tensor,
    conv_states: Tensor,
    conv_weights: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """`causal_conv1d_update` of one or several tokens per sequence into a new tensor; the states
    are changed.

    Args:
        mixed_qkv: [B, D], or [B, D, L]. Float32, bfloat16 or float16.
        conv_states: [slots, D, S], S >= W - 1, changed.
        conv_weights, bias: [D, W]; [D] or None.
        activation: "silu", or None.
        conv_state_indices: [B] int32, or None, as in `causal_conv1d_update`. Slot -1: the sequence
            is skipped.
    Returns:
        A tensor of mixed_qkv's shape and dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    x = mixed_qkv[..., None].clone() if mixed_qkv.dim() == 2 else mixed_qkv.clone()
    causal_conv1d_update.reference(
        x, conv_states, conv_weights, bias, activation == "silu", None, conv_state_indices, PAD
    )
    return x.view(mixed_qkv.shape)


@causal_conv1d_fn_cpu.fake
def _(call: Call) -> Tensor:
    return torch.empty(
        call.mixed_qkv_transposed.shape,
        dtype=call.mixed_qkv_transposed.dtype,
        device=call.mixed_qkv_transposed.device,
    )


@causal_conv1d_update_cpu.fake
def _(call: Call) -> Tensor:
    return torch.empty(
        call.mixed_qkv.shape, dtype=call.mixed_qkv.dtype, device=call.mixed_qkv.device
    )


def _expect_activation(op: str, activation: str | None) -> None:
    if activation is not None and activation != "silu":
        refuse(op, "activation", f"is {activation!r}, not 'silu' or None")


@causal_conv1d_fn_cpu.check
def _(call: Call) -> None:
    name, weight, x = "causal_conv1d_fn_cpu", call.conv_weights, call.mixed_qkv_transposed
    convolution.expect_weights(name, ("conv_weights", "bias"), weight, call.bias)
    expect(name, "mixed_qkv_transposed", x, (weight.shape[0], None), FLOATS, weight)
    expect(name, "query_start_loc", call.query_start_loc, 1, INT32, weight)
    segments.expect_starts(name, "query_start_loc", call.query_start_loc, x.shape[1], weight)
    count = call.query_start_loc.shape[0] - 1
    convolution.expect_states(name, "conv_states", call.conv_states, weight)
    convolution.expect_slots(
        name, "cache_indices", call.cache_indices, count, call.conv_states, weight
    )
    if call.has_initial_state is not None:
        kinds = (torch.bool,)
        expect(name, "has_initial_state", call.has_initial_state, (count,), kinds, weight)
    _expect_activation(name, call.activation)


@causal_conv1d_update_cpu.check
def _(call: Call) -> None:
    name, weight = "causal_conv1d_update_cpu", call.conv_weights
    convolution.expect_weights(name, ("conv_weights", "bias"), weight, call.bias)
    expect(name, "mixed_qkv", call.mixed_qkv, dtypes=FLOATS, like=weight)
    shape = call.mixed_qkv.shape
    if call.mixed_qkv.dim() not in (2, 3) or shape[1] != weight.shape[0]:
        wanted = f"[B, {weight.shape[0]}] or [B, {weight.shape[0]}, L]"
        refuse(name, "mixed_qkv", f"has shape {list(shape)}, not {wanted}")
    expect(name, "conv_states", call.conv_states, 3, FLOATS, weight)
    convolution.expect_states(name, "conv_states", call.conv_states, weight)
    slots = call.conv_state_indices
    convolution.expect_slots(name, "conv_state_indices", slots, shape[0], call.conv_states, weight)
    _expect_activation(name, call.activation)
