"""The causal convolution of linear attention layers: depthwise, over each sequence separately.

y_t = act(bias + sum over j < W of w[:, j] * u_{t - W + 1 + j}), in float32. A slot of the state
holds the last inputs u of its sequence, the oldest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import FLOATS, INT32, expect, expect_within, refuse


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Outputs of inputs in order: window [..., D, W - 1 + L] gives [..., D, L] float32."""
    width = weight.shape[1]
    tokens = window.shape[-1] - width + 1
    y = window.new_zeros((), dtype=torch.float32) if bias is None else bias.float()[:, None]
    for tap in range(width):
        y = y + weight[:, tap, None].float() * window[..., tap : tap + tokens].float()
    # Not torch's silu: on a CPU its vectorised body and scalar tail round differently.
    return y / (1 + torch.exp(-y)) if silu else y


def read_state(states: Tensor, slot: Tensor, used: Tensor) -> Tensor:
    """States [N, D, S] of sequences; zeros where `used` [N] is False, whatever the slot holds."""
    held = states[torch.where(used, slot, 0).long()]
    return torch.where(used[:, None, None], held, 0)


def ragged(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    starts: Tensor,
    slot: Tensor | None,
    used: Tensor | None,
    silu: bool,
    skipped: int | None,
    stored: Tensor | None = None,
) -> Tensor:
    """Outputs [D, T] float32 of concatenated sequences; the states are changed.

    Args:
        x: [D, T].
        weight, bias: [D, W], [D] or None.
        states: [slots, D, S], S >= W - 1, or None: all start from zeros, nothing is stored.
        starts: [N + 1] integers: sequence n has tokens starts[n] .. starts[n + 1] - 1.
        slot: [N] integers, or None: sequence n has slot n.
        used: [N] bool, whether a sequence starts from its slot; None: all start from zeros.
        silu: whether act is silu, else the identity.
        skipped: slot of padding sequences, whose outputs are their inputs; None: no padding.
        stored: [N] integers, slots to store the final states in; negative: not stored; None:
            `slot`.
    """
    count = starts.shape[0] - 1
    history = weight.shape[1] - 1 if states is None else states.shape[2]
    starts = starts.long()
    slot = torch.arange(count, device=x.device) if slot is None else slot
    # Each sequence is preceded by the inputs in its state.
    padded = x.new_zeros(x.shape[0], x.shape[1] + history * count)
    token = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    inside = (token >= starts[0]) & (token < starts[-1])
    place = token + history * (sequence.clamp(max=max(0, count - 1)) + 1)
    padded[:, place[inside]] = x[:, inside]
    column = torch.arange(history, device=x.device)
    if states is not None and used is not None and count:
        before = read_state(states, slot, used & (slot >= 0)).to(x.dtype)
        first = starts[:-1] + history * torch.arange(count, device=x.device)
        padded[:, first[:, None] + column] = before.transpose(0, 1)
    y = convolve(padded, weight, bias, silu)
    live = inside.clone()
    if skipped is not None:
        live[inside] = slot[sequence[inside]] != skipped
    out = x.to(torch.float32, copy=True)
    # convolve's output i belongs to input i + W - 1.
    out[:, live] = y[:, place[live] - (weight.shape[1] - 1)]
    if states is not None and count:
        target = slot if stored is None else stored
        kept = target >= 0 if skipped is None else (target >= 0) & (slot != skipped)
        last = starts[1:] + history * torch.arange(count, device=x.device)
        after = padded[:, last[:, None] + column].transpose(0, 1)
        states[target[kept].long()] = after[kept].to(states.dtype)
    return out


def expect_weights(op: str, names: tuple[str, str], weight: Tensor, bias: Tensor | None) -> None:
    """Raise BadArgument unless the weight is [D, W >= 1] and the bias [D] or None."""
    expect(op, names[0], weight, 2, FLOATS)
    if not weight.shape[1]:
        refuse(op, names[0], f"has shape {list(weight.shape)}, not [D, W] with W > 0")
    if bias is not None:
        expect(op, names[1], bias, weight.shape[:1], FLOATS, weight)


def expect_states(op: str, name: str, states: Tensor | None, weight: Tensor) -> None:
    """Raise BadArgument unless states are [slots, D, W - 1 or more] or None."""
    if states is None:
        return
    expect(op, name, states, (None, weight.shape[0], None), FLOATS, weight)
    if states.shape[2] < weight.shape[1] - 1:
        wanted = f"[slots, {weight.shape[0]}, {weight.shape[1] - 1} or more]"
        refuse(op, name, f"has shape {list(states.shape)}, not {wanted}")


def expect_slots(
    op: str, name: str, slots: Tensor | None, count: int, states: Tensor | None, like: Tensor
) -> None:
    """Raise BadArgument unless slots are [count] int32, each in range or negative; or None, with a
    state for every sequence."""
    held = 0 if states is None else states.shape[0]
    if slots is not None:
        expect(op, name, slots, (count,), INT32, like)
        if states is not None:
            expect_within(op, name, slots, held, None)
    elif states is not None and held < count:
        refuse(op, name, f"is None: {held} slots are too few for {count} sequences")
