"""The short causal convolution, not in place: with the arguments of sgl-kernel's CPU back end."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.mamba import convolution, segments
from cairn.ops.mamba.causal_conv1d_update import causal_conv1d_update
from cairn.ops.mamba.sizes import net_of
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

PAD = -1
"""Slot of sequences that are left as they are."""


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
    """`causal_conv1d_fwd` of sequences side by side, into a new tensor; the states are changed.

    Args:
        mixed_qkv_transposed: [D, T] float32, bfloat16 or float16.
        conv_weights, bias: [D, W]; [D] or None.
        activation: "silu", or None.
        conv_states: [slots, D, S], S >= W - 1, or None, changed.
        has_initial_state, cache_indices, query_start_loc: [N] bool, [N] and [N + 1] int32, as
            there. Slot -1: the sequence is left as it is.
        seq_lens_cpu: without effect.
    Returns:
        [D, T] of the input's dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots that there are not.
    """
    y = convolution.ragged(
        *(mixed_qkv_transposed, conv_weights, bias, conv_states, query_start_loc, cache_indices),
        *(has_initial_state, activation == "silu", PAD),
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
    """`causal_conv1d_update` of one token a sequence, or several, into a new tensor; the states are
    changed.

    Args:
        mixed_qkv: [B, D], or [B, D, L]. Float32, bfloat16 or float16.
        conv_states: [slots, D, S], S >= W - 1, changed.
        conv_weights, bias: [D, W]; [D] or None.
        activation: "silu", or None.
        conv_state_indices: [B] int32, or None, as there. Slot -1: the sequence is left as it is.
    Returns:
        What mixed_qkv is, of its dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots that there are not.
    """
    x = mixed_qkv[..., None].clone() if mixed_qkv.dim() == 2 else mixed_qkv.clone()
    causal_conv1d_update.reference(
        *(x, conv_states, conv_weights, bias, activation == "silu", None, conv_state_indices, PAD)
    )
    return x.view(mixed_qkv.shape)


@causal_conv1d_fn_cpu.fake
def _(mixed_qkv_transposed: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(
        mixed_qkv_transposed.shape,
        dtype=mixed_qkv_transposed.dtype,
        device=mixed_qkv_transposed.device,
    )


@causal_conv1d_update_cpu.fake
def _(mixed_qkv: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(mixed_qkv.shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device)


def _expect_activation(op: str, activation: str | None) -> None:
    if activation is not None and activation != "silu":
        refuse(op, "activation", f"is {activation!r}, not 'silu' or None")


@causal_conv1d_fn_cpu.check
def _(
    mixed_qkv_transposed: Tensor,
    conv_weights: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor | None,
    has_initial_state: Tensor | None,
    cache_indices: Tensor | None,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int] | None,
) -> None:
    name, weight, x = "causal_conv1d_fn_cpu", conv_weights, mixed_qkv_transposed
    convolution.expect_weights(name, ("conv_weights", "bias"), weight, bias)
    expect(name, "mixed_qkv_transposed", x, (weight.shape[0], None), FLOATS, weight)
    expect(name, "query_start_loc", query_start_loc, 1, INT32, weight)
    segments.expect_starts(name, "query_start_loc", query_start_loc, x.shape[1], weight)
    count = query_start_loc.shape[0] - 1
    convolution.expect_states(name, "conv_states", conv_states, weight)
    convolution.expect_slots(name, "cache_indices", cache_indices, count, conv_states, weight)
    if has_initial_state is not None:
        kinds = (torch.bool,)
        expect(name, "has_initial_state", has_initial_state, (count,), kinds, weight)
    _expect_activation(name, activation)


@causal_conv1d_update_cpu.check
def _(
    mixed_qkv: Tensor,
    conv_states: Tensor,
    conv_weights: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
) -> None:
    name, weight = "causal_conv1d_update_cpu", conv_weights
    convolution.expect_weights(name, ("conv_weights", "bias"), weight, bias)
    expect(name, "mixed_qkv", mixed_qkv, dtypes=FLOATS, like=weight)
    shape = mixed_qkv.shape
    if mixed_qkv.dim() not in (2, 3) or shape[1] != weight.shape[0]:
        wanted = f"[B, {weight.shape[0]}] or [B, {weight.shape[0]}, L]"
        refuse(name, "mixed_qkv", f"has shape {list(shape)}, not {wanted}")
    expect(name, "conv_states", conv_states, 3, FLOATS, weight)
    convolution.expect_states(name, "conv_states", conv_states, weight)
    slots = conv_state_indices
    convolution.expect_slots(name, "conv_state_indices", slots, shape[0], conv_states, weight)
    _expect_activation(name, activation)


@causal_conv1d_fn_cpu.cases
def _(make: Make) -> Cases:
    starts = make.tensor([0, 6, 6, 8], torch.int32)
    slot = make.tensor([2, 0, -1], torch.int32)
    used = make.tensor([True, True, False], torch.bool)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = make.randn(5, 9, dtype=dtype), make.randn(5, 4, dtype=dtype)
        states = make.randn(3, 5, 3, dtype=dtype)
        yield make.args(x, weight, None, "silu", states, used, slot, starts, [6, 0, 2])
        bias = make.randn(5, dtype=dtype)
        yield make.args(x, weight, bias, None, None, None, None, starts, None)


@causal_conv1d_update_cpu.cases
def _(make: Make) -> Cases:
    slot = make.tensor([2, -1, 1], torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        weight, states = make.randn(5, 4, dtype=dtype), make.randn(3, 5, 3, dtype=dtype)
        bias = make.randn(5, dtype=dtype)
        yield make.args(make.randn(3, 5, dtype=dtype), states, weight, bias, "silu", slot)
        yield make.args(make.randn(3, 5, 2, dtype=dtype), states, weight, None, None, None)


@causal_conv1d_fn_cpu.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for tokens in net.prefills:
        x, weight = draw.randn(net.channels, tokens), draw.randn(net.channels, net.width)
        starts = draw.tensor([0, tokens], torch.int32)
        given = draw.args(x, weight, None, "silu", None, None, None, starts, None)
        yield Point(f"{tokens} x {net.channels}", given, moved(x, x, weight))


@causal_conv1d_update_cpu.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for batch in net.batches:
        x, weight = draw.randn(batch, net.channels), draw.randn(net.channels, net.width)
        states = draw.randn(batch, net.channels, net.width - 1)
        given = draw.args(x, states, weight, None, "silu", None)
        size = f"{batch} x {net.channels}"
        yield Point(size, given, moved(x, x, weight, states, states))
