"""The short causal convolution over the next few tokens of every sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, INT32, expect, expect_within, refuse
from cairn.ops.mamba import convolution
from cairn.ops.mamba.sizes import net_of
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

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
    rounded once; the states become the last inputs of their sequences.

    Args:
        x: [B, D, L], changed. Float32, bfloat16 or float16.
        conv_state: [slots, D, S] with S >= W - 1, changed; the oldest input first.
        weight: [D, W].
        bias_: [D], or None.
        silu_activation: act is silu, else the identity.
        cache_seqlens: [B] int32, tokens p before these: the state is a ring, input i lies at i mod
            S, and L <= S - W + 1 or what a later token reads would be overwritten. None: it is
            shifted by L.
        conv_state_indices: [B] int32, slots. A negative one: from zeros, and nothing is stored.
            None: sequence n has slot n.
        pad_slot_id: sequences with this slot are left as they are.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots that there are not.
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
        # Where input p - W + 1 + j lies, for the tokens before and the new ones.
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
def _(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias_: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    pad_slot_id: int,
) -> None:
    convolution.expect_weights(NAME, ("weight", "bias_"), weight, bias_)
    expect(NAME, "x", x, (None, weight.shape[0], None), FLOATS, weight)
    expect(NAME, "conv_state", conv_state, 3, FLOATS, weight)
    convolution.expect_states(NAME, "conv_state", conv_state, weight)
    slots = conv_state_indices
    convolution.expect_slots(NAME, "conv_state_indices", slots, x.shape[0], conv_state, weight)
    if cache_seqlens is not None:
        expect(NAME, "cache_seqlens", cache_seqlens, x.shape[:1], INT32, weight)
        expect_within(NAME, "cache_seqlens", cache_seqlens, 1 << 31)
        room = conv_state.shape[2] - weight.shape[1] + 1
        if x.shape[2] > max(1, room):
            problem = f"has {x.shape[2]} tokens: a ring of {conv_state.shape[2]} takes {room}"
            refuse(NAME, "x", problem, "Give longer states, or fewer tokens")
    if not isinstance(pad_slot_id, int):
        refuse(NAME, "pad_slot_id", f"is {pad_slot_id!r}, not an integer")


@causal_conv1d_update.cases
def _(make: Make) -> Cases:
    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = make.randn(6, 4, dtype=dtype), make.randn(6, dtype=dtype)
        states, longer = (make.randn(5, 6, size, dtype=dtype) for size in (3, 8))
        x, slot = make.randn(4, 6, 1, dtype=dtype), words(3, 0, -1, 4)
        yield make.args(x, states, weight, bias, True, None, slot, -1)
        yield make.args(x, states, weight, None, False, None, None, -1)
        more = make.randn(4, 6, 4, dtype=dtype)
        yield make.args(more, longer, weight, bias, True, None, slot, -9)
        yield make.args(more, longer, weight, bias, True, words(0, 7, 3, 100), slot, -1)
    yield make.args(make.randn(0, 6, 1), make.randn(2, 6, 1), make.randn(6, 2), None, True, None,
                    make.tensor([], torch.int32), -1)  # fmt: skip


@causal_conv1d_update.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for batch in net.batches:
        x, weight = draw.randn(batch, net.channels, 1), draw.randn(net.channels, net.width)
        states = draw.randn(batch + 1, net.channels, net.width - 1)
        slot = draw.arange(batch, torch.int32) + 1
        yield Point(
            f"{batch} x {net.channels}",
            draw.args(x, states, weight, None, True, None, slot, -1),
            moved(x, x, weight, states[1:], states[1:]),
        )
