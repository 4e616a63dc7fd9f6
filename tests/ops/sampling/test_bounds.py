"""Bounds of the weights that are listed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.bounds import (
    bound_of,
    guess_of,
    height_of,
    reached_by,
    sample_of,
)
from cairn.ops.sampling.kernels.filters import bits_of, weight_of
from cairn.ops.sampling.tuning import TUNING

pytestmark = pytest.mark.usefixtures("launches")
LINES = 64


@triton.jit
def bounds_kernel(keys, wanted, enough, out, N: tl.constexpr):
    """out [n]: `reached_by` keys [n, N]."""
    row = tl.program_id(0)
    key = tl.load(keys + row * N + tl.arange(0, N))
    tl.store(out + row, reached_by(key, wanted, enough))


@triton.jit
def guess_kernel(
    x, spare, floor, end, out, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr, SURE: tl.constexpr,
    TRIALS: tl.constexpr,
):  # fmt: skip
    """out [n, 2]: `guess_of` rows of probabilities whose largest is 1."""
    row = tl.program_id(0)
    sample, stands_for = sample_of(
        x + row * width, 1.0, 1.0, width, CHUNKS, CHUNK, SAMPLE, False
    )  # fmt: skip
    low, high = guess_of(
        sample, stands_for, tl.load(spare + row), 1.0, tl.load(floor + row), tl.load(end + row),
        SURE, TRIALS,
    )  # fmt: skip
    tl.store(out + row * 2, low)
    tl.store(out + row * 2 + 1, high)


@triton.jit(do_not_specialize=["low"])
def bound_kernel(values, temp, low, out, SOFTMAX: tl.constexpr, N: tl.constexpr):
    """out [N] int32: whether each of values [N] is listed, and whether it must be; the largest
    value is 5."""
    value = tl.load(values + tl.arange(0, N))
    weight = weight_of(value, 5.0, temp, SOFTMAX)
    listed = height_of(value, 5.0, SOFTMAX) >= bound_of(low, temp, SOFTMAX)
    wanted = bits_of(weight) >= low
    tl.store(out + tl.arange(0, N), listed.to(tl.int32) + 2 * wanted.to(tl.int32))


def rows_of(kind: str) -> Tensor:
    torch.manual_seed(7)
    if kind == "zeros":
        return torch.zeros(3, LINES)
    if kind == "equal":
        return torch.rand(20, LINES).mul(4).round() / 4
    return torch.softmax(torch.randn(60, LINES) * float(kind), dim=-1)


@pytest.mark.parametrize("wanted", [1, 2, 7, 40, LINES])
@pytest.mark.parametrize("kind", ["zeros", "equal", "0.001", "1", "3", "20"])
def test_bounds_are_reached_by_few_more_than_wanted(kind: str, wanted: int, device: str) -> None:
    enough = wanted + wanted // 8
    keys = rows_of(kind).to(device).view(torch.int32)
    out = torch.empty(len(keys), dtype=torch.int32, device=device)
    bounds_kernel[(len(keys),)](keys, wanted, enough, out, LINES)
    reach = (keys >= out[:, None]).sum(1)
    assert (reach >= wanted).all()
    # More than `enough` only if the next larger bound gives fewer than wanted.
    assert ((reach <= enough) | ((keys > out[:, None]).sum(1) < wanted)).all()


def guessed(rows: Tensor, share: Tensor, floor: float = 2.0**-100) -> tuple[Tensor, Tensor]:
    """Estimated bounds of rows whose maximum is 1."""
    device, count = rows.device, len(rows)
    spare = ((1.0 - share.double()) * rows.double().sum(1)).float()
    floors = torch.full((count,), floor, device=device).view(torch.int32)
    ends = torch.ones(count, device=device).view(torch.int32) + 1
    out = torch.empty(count, 2, dtype=torch.int32, device=device)
    guess_kernel[(count,)](
        *(rows, spare, floors, ends, out, rows.shape[1], 4, 1024),
        *(TUNING.sample, TUNING.sure, TUNING.trials),
    )
    return out[:, :1].view(torch.float32), out[:, 1:].view(torch.float32)


@pytest.mark.parametrize("share", [0.05, 0.9, 1 - 1e-4])
@pytest.mark.parametrize("sharpness", [0.1, 2.0, 6.0])
def test_a_share_is_reached_between_guessed_bounds(
    sharpness: float, share: float, device: str
) -> None:
    torch.manual_seed(9)
    rows = torch.softmax(torch.randn(6, 4000) * sharpness, dim=-1)
    rows = (rows / rows.amax(1, keepdim=True)).to(device)
    low, high = guessed(rows, torch.full((6,), share, device=device))
    wide = rows.double()
    wanted = share * wide.sum(1)
    assert (torch.where(rows >= low, wide, 0.0).sum(1) >= wanted).all()
    assert (torch.where(rows >= high, wide, 0.0).sum(1) < wanted).all()
    if share == 0.9 and sharpness > 2:
        between = ((rows >= low) & (rows < high)).sum(1)
        assert (between < 1500).all()


def test_guessed_bounds_do_not_leave_the_range(device: str) -> None:
    torch.manual_seed(9)
    rows = torch.rand(3, 4000).to(device)
    rows[:, 0] = 1.0
    low, high = guessed(rows, torch.tensor([0.5, 1.0, 0.999]).to(device), floor=0.3)
    assert (low >= 0.3).all()
    assert (high > low).all()
    assert (high.view(torch.int32) <= torch.ones_like(high).view(torch.int32) + 1).all()


@pytest.mark.parametrize("low", [1e-45, 1e-39, 2.0**-126, 1e-30, 1e-7, 0.3, 1.0])
@pytest.mark.parametrize("temp", [1e-30, 0.01, 0.7, 1.0, 1e30])
def test_all_that_weigh_enough_are_listed_and_hardly_more(
    temp: float, low: float, device: str
) -> None:
    torch.manual_seed(9)
    values = 5.0 - torch.rand(4096).pow(3) * temp * 160
    values[:512] = 5.0 - torch.rand(512) * 1e-5 * temp
    values[0], values[1] = 5.0, float("-inf")
    bits = int(torch.tensor(low).view(torch.int32))
    out = torch.empty(4096, dtype=torch.int32, device=device)
    for softmax, given in ((True, values), (False, torch.rand(4096).pow(20))):
        bound_kernel[(1,)](given.to(device), temp, max(bits, 1), out, softmax, 4096)
        assert (out != 2).all()
        if not softmax:
            assert (out != 1).all()
        elif 2.0**-126 < low < 1.0 and 0.01 <= temp <= 1.0:
            assert (out == 1).sum() <= 64
