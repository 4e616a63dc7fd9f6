"""The causal convolution against torch's convolution, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument

D, W = 5, 4


def words(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def alone(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = True) -> Tensor:
    """[D, L] from its first token on, in float64."""
    wide = None if bias is None else bias.double()
    padded = torch.nn.functional.pad(inputs.double(), (weight.shape[1] - 1, 0))
    kernel, groups = weight.double().unsqueeze(1), weight.shape[0]
    y = torch.nn.functional.conv1d(padded[None], kernel, wide, groups=groups)[0]
    return torch.nn.functional.silu(y) if silu else y


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [(9, 0, 1, 2, 3), (0,), (1, 1, 1), (17,)])
def test_cut_anywhere_it_is_that_of_the_whole(lengths: tuple[int, ...], width: int) -> None:
    torch.manual_seed(width)
    weight, bias = torch.randn(D, width), torch.randn(D)
    states = torch.full((len(lengths) + 2, D, width - 1), torch.nan)
    slot = torch.randperm(len(lengths) + 2)[: len(lengths)].int()
    inputs = [torch.randn(D, 2 * length + 1) for length in lengths]
    expected = [alone(x, weight, bias) for x in inputs]
    cuts = [(0, length) for length in lengths], [(length, 2 * length + 1) for length in lengths]
    for number, spans in enumerate(cuts):
        x = torch.cat([u[:, a:b] for u, (a, b) in zip(inputs, spans, strict=True)], dim=1)
        starts = words(0, *torch.tensor([b - a for a, b in spans]).cumsum(0).tolist())
        used = torch.full((len(lengths),), number > 0)
        ops.causal_conv1d_fwd(x, weight, bias, states, starts, slot, used, True, -1)
        wanted = torch.cat([y[:, a:b] for y, (a, b) in zip(expected, spans, strict=True)], dim=1)
        torch.testing.assert_close(x.double(), wanted, rtol=1e-5, atol=1e-5)
    for n, u in enumerate(inputs):
        last = torch.nn.functional.pad(u, (width - 1, 0))[:, u.shape[1] :]
        assert torch.equal(states[slot[n]], last)


def test_slots_of_others_stay_as_they_are() -> None:
    weight, states = torch.randn(D, W), torch.randn(4, D, W - 1)
    before, x = states.clone(), torch.randn(D, 7)
    given = x.clone()
    starts, slot = words(0, 2, 4, 5), words(-1, 2, -7)
    used = torch.ones(3, dtype=torch.bool)
    ops.causal_conv1d_fwd(x, weight, None, states, starts, slot, used, False, -1)
    # The first sequence is padding, the third has no slot; tokens after the last one belong to
    # none.
    assert torch.equal(x[:, :2], given[:, :2]) and torch.equal(x[:, 5:], given[:, 5:])
    wanted = alone(given[:, 4:5], weight, None, silu=False)
    torch.testing.assert_close(x[:, 4:5].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(states[[0, 1, 3]], before[[0, 1, 3]])
    assert torch.equal(states[2], torch.cat((before[2, :, 2:], given[:, 2:4]), dim=1))


def test_rows_of_one_length_need_no_starts() -> None:
    weight, x = torch.randn(D, W), torch.randn(3, D, 6)
    flat, starts = x.transpose(0, 1).flatten(1).clone(), words(0, 6, 12, 18)
    ops.causal_conv1d_fwd(x, weight, None, None, None, None, None, True, -1)
    ops.causal_conv1d_fwd(flat, weight, None, None, starts, None, None, True, -1)
    assert torch.equal(x.transpose(0, 1).flatten(1), flat)


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("ring", [False, True])
def test_token_by_token_it_is_that_of_the_whole(ring: bool, extra: int) -> None:
    torch.manual_seed(extra)
    weight, bias = torch.randn(D, W), torch.randn(D)
    u, size = torch.randn(2, D, 12), W + extra
    expected = torch.stack([alone(row, weight, bias) for row in u])
    states, slot = torch.zeros(3, D, size), words(2, 0)
    states[1] = torch.nan
    found, at = [], 0
    for tokens in (1, 1 + extra, 1, 1 + extra, 1):
        x = u[..., at : at + tokens].clone()
        before = words(at, at) if ring else None
        ops.causal_conv1d_update(x, states, weight, bias, True, before, slot, -1)
        found.append(x)
        at += tokens
    wanted = expected[..., :at]
    torch.testing.assert_close(torch.cat(found, -1).double(), wanted, rtol=1e-5, atol=1e-5)
    held = states[slot.long()]
    if ring:
        held = held.roll(-(at % size), dims=-1)
    assert torch.equal(held[..., 1 - W :], u[..., at - W + 1 : at])
    assert states[1].isnan().all()


def test_a_token_without_a_slot_starts_from_zeros_and_stores_nothing() -> None:
    weight, states = torch.randn(D, W), torch.full((2, D, W - 1), torch.nan)
    x = torch.randn(2, D, 1)
    given = x.clone()
    ops.causal_conv1d_update(x, states, weight, None, False, None, words(-2, -1), -1)
    torch.testing.assert_close(x[0], given[0] * weight[:, -1:])
    assert torch.equal(x[1], given[1])
    assert states.isnan().all()


def test_a_ring_without_room_for_the_tokens_is_refused() -> None:
    weight, states = torch.randn(D, W), torch.zeros(1, D, W)
    with pytest.raises(BadArgument, match="`x` has 2 tokens: a ring of 4 takes 1"):
        ops.causal_conv1d_update(
            torch.randn(1, D, 2), states, weight, None, True, words(0), None, -1
        )


def test_functions_of_the_cpu_back_end_leave_their_input() -> None:
    weight, states = torch.randn(D, W), torch.randn(2, D, W - 1)
    x, other = torch.randn(D, 5), states.clone()
    given, own = x.clone(), x.clone()
    where = (torch.ones(1, dtype=torch.bool), words(1), words(0, 5))
    y = ops.causal_conv1d_fn_cpu(x, weight, None, "silu", states, *where, [5])
    ops.causal_conv1d_fwd(own, weight, None, other, where[2], where[1], where[0], True, -1)
    assert torch.equal(x, given) and torch.equal(y, own) and torch.equal(states, other)
    x, own = torch.randn(1, D), None
    given = x.clone()
    y = ops.causal_conv1d_update_cpu(x, states, weight, None, None, words(0))
    own = given[..., None].clone()
    ops.causal_conv1d_update(own, other, weight, None, False, None, words(0), -1)
    assert torch.equal(x, given) and torch.equal(y, own[..., 0]) and torch.equal(states, other)
