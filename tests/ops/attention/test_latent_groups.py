"""cutlass_mla_decode by groups of warps, on the device it is for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.ops import cutlass_mla_decode, gpu
from cairn.ops.attention import launch
from cairn.ops.attention.cutlass_mla_decode import LATENT, ROPE, _drawn
from cairn.ops.testing import Arguments, Make, check, run

needs_groups = pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu.multiplies_in_groups(torch.device("cuda", 0))),
    reason="needs Hopper's tensor cores and Triton 3.6",
)
pytestmark = pytest.mark.gpu
WIDTHS = (LATENT, ROPE)
HEADS = {"gluon": 128, "gluon_few": 32}
"""The most that each implementation takes."""
every = pytest.mark.parametrize("name", HEADS)
RAGGED = [1000, 0, 1, 63, 64, 65, 127, 128, 129, 200]
"""Of one block and several, of an odd number of them, whole and not, none at all."""


def drawn(
    lengths: list[int], heads: int = 128, size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Arguments:
    torch.manual_seed(0)
    return _drawn(Make("cuda"), lengths, heads, size, WIDTHS, dtype)


def by_groups(given: Arguments, name: str) -> Tensor:
    return run(cutlass_mla_decode, name, given)[1][0]


@needs_groups
@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize(
    "name, heads, size",
    [
        *(("gluon", *sizes) for sizes in ((128, 64), (100, 128), (64, 192), (33, 64), (1, 64))),
        *(("gluon_few", *sizes) for sizes in ((32, 64), (17, 128), (16, 192), (5, 64), (1, 64))),
    ],
)
def test_softmax_over_the_latents(
    name: str, heads: int, size: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "whole_waves", lambda *_: splits)
    check(cutlass_mla_decode, name, drawn(RAGGED, heads, size))


@needs_groups
@every
def test_many_blocks_are_the_same_every_time(name: str) -> None:
    given = drawn([70_001, 3, 40_000, 65_536], HEADS[name])
    first = by_groups(given, name)
    check(cutlass_mla_decode, name, given)
    for _ in range(50):
        assert torch.equal(by_groups(given, name), first)


@needs_groups
@every
def test_a_row_is_the_same_alone_where_splits_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "whole_waves", lambda *_: 3)
    given = drawn(RAGGED, HEADS[name])
    q, pe, cache, lengths, table, *rest = given.args
    together = by_groups(given, name)
    for row in range(len(RAGGED)):
        one = slice(row, row + 1)
        alone = Arguments((q[one], pe[one], cache, lengths[one], table[one], *rest), {})
        assert torch.equal(by_groups(alone, name), together[one])


@needs_groups
@every
def test_numbers_that_are_none_stay_where_they_are(name: str) -> None:
    given = drawn([300, 300, 300], HEADS[name])
    q, _, cache, _, table, *_ = given.args
    wanted = by_groups(given, name)
    cache[table[1, 2].long(), 5, 17] = torch.nan
    spoilt = by_groups(given, name)
    assert torch.equal(spoilt[::2], wanted[::2])
    assert spoilt[1].isnan().all()
    cache[table[1, 2].long(), 5, 17] = 0
    q[2, 4, 0] = torch.nan
    spoilt = by_groups(given, name)
    assert spoilt[2, 4].isnan().all()
    assert not spoilt[2, :4].isnan().any()
    assert not spoilt[:2].isnan().any()


@needs_groups
@every
def test_logits_far_apart(name: str) -> None:
    given = drawn([400, 130], HEADS[name])
    for scale in (0.0, 30.0, -30.0):
        args = (*given.args[:-1], scale)
        check(cutlass_mla_decode, name, Arguments(args, given.kwargs))


@needs_groups
@every
@pytest.mark.parametrize("step", [0.01, 0.06, 0.3, 5.0, -0.06, -5.0])
def test_logits_that_rise_from_slot_to_slot(name: str, step: float) -> None:
    given = drawn([4000, 700], HEADS[name])
    _, pe, cache, lengths, table, *rest = given.args
    slots = torch.arange(table.shape[1] * 64, device="cuda").view(table.shape[1], 64)
    for row in range(len(lengths)):
        # Of two of three heads logits rise by `step`, to base 2, from one slot to the next.
        cache[table[row].long(), :, -2] = (slots // 64).to(cache.dtype)
        cache[table[row].long(), :, -1] = (slots % 64).to(cache.dtype)
    unit = step * math.log(2) / rest[-1]
    pe[..., -2:] = torch.tensor([64 * unit, unit], device="cuda")
    pe[:, ::3, -2:] = 0
    check(cutlass_mla_decode, name, given)


@needs_groups
@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_slot_that_outweighs_all_others_is_as_it_is(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "whole_waves", lambda *_: 1)
    given = drawn([1000], HEADS[name], dtype=dtype)
    q, pe, cache, lengths, table, spare, _ = given.args
    q.zero_()
    pe.zero_()
    pe[..., 0] = torch.linspace(1, 1.25, HEADS[name]).to(pe)
    # Powers of two that slots weigh, as logits: the first block says what weights are relative to,
    # and the largest is less above it than has sums scaled.
    logits = torch.full((table.shape[1], 64), -40.0, device="cuda")
    logits[0, 7], logits[3, 5] = 0.0, 6.25
    cache[table[0].long(), :, LATENT] = logits.to(dtype)
    args = (q, pe, cache, lengths, table, spare, math.log(2))
    found = by_groups(Arguments(args, {}), name)[0].double()
    slots = cache[table[0].long()].reshape(-1, LATENT + ROPE)[:1000].double()
    weights = torch.softmax(pe[0].double() @ slots[:, LATENT:].T * math.log(2), -1)
    wanted = weights @ slots[:, :LATENT]
    half = torch.finfo(dtype).eps / 2
    assert ((found - wanted).abs() <= 1.1 * half * wanted.abs() + half / 32).all()


@needs_groups
@every
def test_a_head_is_the_same_whatever_the_others_see(name: str) -> None:
    given = drawn([5000, 333], HEADS[name])
    wanted = by_groups(given, name)
    given.args[0][:, 1::2] *= 40
    assert torch.equal(by_groups(given, name)[:, ::2], wanted[:, ::2])


@needs_groups
def test_what_does_not_fit_is_left_to_the_others() -> None:
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
    assert not accepts("gluon_few", q, pe, cache, lengths, table, *rest)
    some = (q[:, :32], pe[:, :32])
    assert accepts("gluon_few", *some, cache, lengths, table, *rest)
    assert not accepts("gluon_few", *some, halves, lengths, table, *rest)
