"""The short causal convolution over whole sequences, or over their next tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.mamba import convolution, segments
from cairn.ops.mamba.sizes import net_of
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

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
    rounded once; the states become the last inputs of their sequences.

    The inputs before the first token are those that the slot holds, or zeros. Sequences may be
    shorter than W - 1, or empty: the state is then shifted by so many.

    Args:
        x: [B, D, L], or [D, T] of sequences side by side, changed. Float32, bfloat16 or float16.
        weight: [D, W].
        bias_: [D], or None.
        conv_states: [slots, D, S] with S >= W - 1, changed; the oldest input first. None: all
            start from zeros and nothing is stored.
        query_start_loc: [N + 1] int32: sequence n has tokens query_start_loc[n] ..
            query_start_loc[n + 1] - 1; those behind the last are left as they are. None: x is
            [B, D, L].
        cache_indices: [N] int32, the slot of each sequence. A negative one: it starts from zeros
            and stores nothing. None: sequence n has slot n.
        has_initial_state: [N] bool; False: it starts from zeros, whatever its slot holds. None:
            all do.
        silu_activation: act is silu, else the identity.
        pad_slot_id: sequences with this slot are left as they are, and so is a slot of this number.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots that there are not.
    """
    flat = x if x.dim() == 2 else x.transpose(0, 1).flatten(1)
    starts = query_start_loc
    if starts is None:
        starts = segments.regular(x.shape[0], x.shape[2], x.device)
    y = convolution.ragged(
        *(flat, weight, bias_, conv_states, starts, cache_indices, has_initial_state),
        *(silu_activation, pad_slot_id),
    )
    x.copy_(y if x.dim() == 2 else y.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1))


@causal_conv1d_fwd.check
def _(
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
    convolution.expect_weights(NAME, ("weight", "bias_"), weight, bias_)
    channels = weight.shape[0]
    if query_start_loc is None:
        expect(NAME, "x", x, (None, channels, None), FLOATS, weight)
        count = x.shape[0]
    else:
        expect(NAME, "x", x, (channels, None), FLOATS, weight)
        expect(NAME, "query_start_loc", query_start_loc, 1, INT32, weight)
        segments.expect_starts(NAME, "query_start_loc", query_start_loc, x.shape[1], weight)
        count = query_start_loc.shape[0] - 1
    convolution.expect_states(NAME, "conv_states", conv_states, weight)
    convolution.expect_slots(NAME, "cache_indices", cache_indices, count, conv_states, weight)
    if has_initial_state is not None:
        kinds = (torch.bool,)
        expect(NAME, "has_initial_state", has_initial_state, (count,), kinds, weight)
    if not isinstance(pad_slot_id, int):
        refuse(NAME, "pad_slot_id", f"is {pad_slot_id!r}, not an integer")


@causal_conv1d_fwd.cases
def _(make: Make) -> Cases:
    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    def flags(*values: bool) -> Tensor:
        return make.tensor(values, torch.bool)

    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = make.randn(6, 4, dtype=dtype), make.randn(6, dtype=dtype)
        states = make.randn(5, 6, 3, dtype=dtype)
        states[3] = torch.nan
        # A long one, a fresh one in a slot of NaN, an empty one, shorter ones, one to skip.
        starts, slot = words(0, 9, 14, 14, 15, 17, 20), words(1, 3, 0, 4, 2, -1)
        used = flags(True, False, True, True, True, True)
        x = make.randn(6, 22, dtype=dtype)
        yield make.args(x, weight, bias, states, starts, slot, used, True, -1)
        yield make.args(x, weight, None, states, starts, slot, None, False, -1)
        x = make.randn(2, 6, 5, dtype=dtype)
        yield make.args(x, weight, bias, None, None, None, None, True, -1)
        longer = make.randn(2, 6, 7, dtype=dtype)
        yield make.args(x, weight, bias, longer, None, None, flags(True, True), True, -1)
    narrow = make.randn(3, 1)
    yield make.args(make.randn(3, 4), narrow, None, None, words(0, 4), None, None, False, -1)
    yield make.args(make.randn(3, 0), narrow, None, None, words(0), None, None, True, -1)


@causal_conv1d_fwd.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for tokens in net.prefills:
        x, weight = draw.randn(net.channels, tokens), draw.randn(net.channels, net.width)
        states = draw.randn(2, net.channels, net.width - 1)
        starts, slot = draw.tensor([0, tokens], torch.int32), draw.tensor([1], torch.int32)
        used = draw.tensor([True], torch.bool)
        yield Point(
            f"{tokens} x {net.channels}",
            draw.args(x, weight, None, states, starts, slot, used, True, -1),
            moved(x, x, weight),
        )
