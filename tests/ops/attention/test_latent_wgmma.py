"""The wgmma kernel of cutlass_mla_decode, on a Hopper GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.ops import cutlass_mla_decode, gpu
from cairn.ops.attention import launch
from cairn.ops.attention.cases import latents
from cairn.ops.attention.cutlass_mla_decode import LATENT, ROPE
from cairn.ops.testing import Arguments, Make, check, run

needs_groups = pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu.supports_wgmma(torch.device("cuda", 0))),
    reason="needs Hopper's tensor cores and Triton 3.6",
)
pytestmark = pytest.mark.gpu
WIDTHS = (LATENT, ROPE)
RAGGED = [1000, 0, 1, 63, 64, 65, 127, 128, 129, 200]
"""Lengths of zero, one and several blocks, odd numbers of blocks, and partial blocks."""


def drawn(
    lengths: list[int], heads: int = 128, size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Arguments:
    torch.manual_seed(0)
    return latents(Make("cuda"), lengths, heads, size, WIDTHS, dtype)


def by_groups(given: Arguments) -> Tensor:
    return run(cutlass_mla_decode, "gluon", given)[1][0]


@needs_groups
@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize(
    "heads, size", [(128, 64), (100, 128), (64, 192), (33, 64), (16, 192), (1, 64)]
)
def test_softmax_over_the_latents(
    heads: int, size: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "whole_waves", lambda *_: splits)
    check(cutlass_mla_decode, "gluon", drawn(RAGGED, heads, size))


@needs_groups
def test_many_blocks_are_the_same_every_time() -> None:
    given = drawn([70_001, 3, 40_000, 65_536])
    first = by_groups(given)
    check(cutlass_mla_decode, "gluon", given)
    for _ in range(50):
        assert torch.equal(by_groups(given), first)


@needs_groups
def test_a_row_is_the_same_alone_where_splits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "whole_waves", lambda *_: 3)
    given = drawn(RAGGED)
    q, pe, cache, lengths, table, *rest = given.args
    together = by_groups(given)
    for row in range(len(RAGGED)):
        one = slice(row, row + 1)
        alone = Arguments((q[one], pe[one], cache, lengths[one], table[one], *rest), {})
        assert torch.equal(by_groups(alone), together[one])


@needs_groups
def test_nan_of_one_sequence_does_not_reach_others() -> None:
    given = drawn([300, 300, 300])
    q, _, cache, _, table, *_ = given.args
    wanted = by_groups(given)
    cache[table[1, 2].long(), 5, 17] = torch.nan
    spoilt = by_groups(given)
    assert torch.equal(spoilt[::2], wanted[::2])
    assert spoilt[1].isnan().all()
    cache[table[1, 2].long(), 5, 17] = 0
    q[2, 4, 0] = torch.nan
    spoilt = by_groups(given)
    assert spoilt[2, 4].isnan().all()
    assert not spoilt[2, :4].isnan().any()
    assert not spoilt[:2].isnan().any()


@needs_groups
def test_logits_far_apart() -> None:
    given = drawn([400, 130])
    for scale in (0.0, 30.0, -30.0):
        args = (*given.args[:-1], scale)
        check(cutlass_mla_decode, "gluon", Arguments(args, given.kwargs))


@needs_groups
@pytest.mark.parametrize("step", [0.01, 0.06, 0.3, 5.0, -0.06, -5.0])
def test_logits_that_rise_from_slot_to_slot(step: float) -> None:
    given = drawn([4000, 700])
    _, pe, cache, lengths, table, *rest = given.args
    slots = torch.arange(table.shape[1] * 64, device="cuda").view(table.shape[1], 64)
    for row in range(len(lengths)):
        # For two of three heads, logits (base 2) rise by `step` from slot to slot.
        cache[table[row].long(), :, -2] = (slots // 64).to(cache.dtype)
        cache[table[row].long(), :, -1] = (slots % 64).to(cache.dtype)
    unit = step * math.log(2) / rest[-1]
    pe[..., -2:] = torch.tensor([64 * unit, unit], device="cuda")
    pe[:, ::3, -2:] = 0
    check(cutlass_mla_decode, "gluon", given)


@needs_groups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_slot_that_outweighs_all_others_is_as_it_is(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "whole_waves", lambda *_: 1)
    given = drawn([1000], 128, dtype=dtype)
    q, pe, cache, lengths, table, spare, _ = given.args
    q.zero_()
    pe.zero_()
    pe[..., 0] = torch.linspace(1, 1.25, 128).to(pe)
    # Base-2 logits of slots: the first block sets the reference, and the maximum exceeds it by less
    # than the threshold of rescaling.
    logits = torch.full((table.shape[1], 64), -40.0, device="cuda")
    logits[0, 7], logits[3, 5] = 0.0, 6.25
    cache[table[0].long(), :, LATENT] = logits.to(dtype)
    args = (q, pe, cache, lengths, table, spare, math.log(2))
    found = by_groups(Arguments(args, {}))[0].double()
    slots = cache[table[0].long()].reshape(-1, LATENT + ROPE)[:1000].double()
    weights = torch.softmax(pe[0].double() @ slots[:, LATENT:].T * math.log(2), -1)
    wanted = weights @ slots[:, :LATENT]
    half = torch.finfo(dtype).eps / 2
    assert ((found - wanted).abs() <= 1.1 * half * wanted.abs() + half / 32).all()


@needs_groups
def test_a_head_is_the_same_whatever_the_others_see() -> None:
    given = drawn([5000, 333])
    wanted = by_groups(given)
    given.args[0][:, 1::2] *= 40
    assert torch.equal(by_groups(given)[:, ::2], wanted[:, ::2])


@needs_groups
def test_unsupported_calls_go_to_other_implementations() -> None:
    q, pe, cache, lengths, table, *rest = drawn([300]).args
    accepts = cutlass_mla_decode.accepts
    assert accepts("gluon", q, pe, cache, lengths, table, *rest)
    assert accepts("gluon", q, pe, cache, lengths.long(), table, *rest)
    halves = cache.reshape(-1, 32, LATENT + ROPE)
    wide = torch.nn.functional.pad(cache, (0, 1))[..., :-1]
    for other in (
        (q, pe, halves),
        (q, pe, wide),
        (q[..., :-64], pe, cache[..., :-64]),
    ):
        assert not accepts("gluon", *other, lengths, table, *rest)
