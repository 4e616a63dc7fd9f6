"""The bounds between which a row's weights are listed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling import launch
from cairn.ops.sampling.kernels.filters import bits_of, summary_of
from cairn.ops.sampling.kernels.lists import between, reached_by

pytestmark = pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
LINES = 64


@pytest.fixture(autouse=True)
def _launches(device: str) -> None:
    if device == "cpu" and not gpu.INTERPRETED:
        pytest.skip("needs a GPU, or Triton's interpreter")


@triton.jit
def bounds_kernel(keys, wanted, enough, out, N: tl.constexpr):
    """out [n]: `reached_by` keys [n, N]."""
    row = tl.program_id(0)
    key = tl.load(keys + row * N + tl.arange(0, N))
    tl.store(out + row, reached_by(key, wanted, enough))


@triton.jit
def between_kernel(
    marked, peaks, masses, share, floor, out, chunks,
    CHUNKS: tl.constexpr, MARKS: tl.constexpr, STEP: tl.constexpr, TRIALS: tl.constexpr,
):  # fmt: skip
    """out [n, 2]: `between` of a share of probabilities that were surveyed."""
    row = tl.program_id(0)
    peak, tops, scale, mass, _ = summary_of(peaks, masses, row, 1.0, chunks, CHUNKS, False)
    low, high = between(
        marked, row, tl.maximum(tops, 0.0) / peak, scale, mass, peak,
        bits_of(tl.load(floor + row)), bits_of(peak) + 1,
        tl.load(share + row) * tl.sum(mass, 0), tl.sum(mass, 0), chunks, MARKS, STEP, TRIALS,
    )  # fmt: skip
    tl.store(out + row * 2, low)
    tl.store(out + row * 2 + 1, high)


def rows_of(kind: str) -> Tensor:
    torch.manual_seed(7)
    if kind == "zeros":
        return torch.zeros(3, LINES)
    if kind == "equal":
        return torch.rand(20, LINES).mul(4).round() / 4
    return torch.softmax(torch.randn(60, LINES) * float(kind), dim=-1)


@pytest.mark.parametrize("wanted", [1, 2, 7, 40, LINES])
@pytest.mark.parametrize("kind", ["zeros", "equal", "0.001", "1", "3", "20"])
def test_as_many_as_are_wanted_and_few_more_reach_the_bound(
    kind: str, wanted: int, device: str
) -> None:
    enough = wanted + wanted // 8
    keys = rows_of(kind).to(device).view(torch.int32)
    out = torch.empty(len(keys), dtype=torch.int32, device=device)
    bounds_kernel[(len(keys),)](keys, wanted, enough, out, LINES)
    reach = (keys >= out[:, None]).sum(1)
    assert (reach >= wanted).all()
    # More of them only where the next number is too much.
    assert ((reach <= enough) | ((keys > out[:, None]).sum(1) < wanted)).all()


@cache
def surveyed(kind: str, device: str) -> tuple[Tensor, launch.Source, launch.Survey]:
    """Rows of three chunks, the last of which is short and has hardly anything."""
    torch.manual_seed(8)
    probs = torch.softmax(torch.randn(2, 1300) * float(kind), dim=-1).to(device)
    probs[:, 1024:] *= 1e-9
    source = launch.Source(probs)
    return probs, source, launch._survey(source, launch.Filters(top_p=probs[:, 0] * 0 + 0.5))


@pytest.mark.parametrize("kind", ["0.001", "3"])
def test_marks_tell_what_a_chunk_has_from_them_on(kind: str, device: str) -> None:
    probs, source, found = surveyed(kind, device)
    assert found.marked is not None
    for c, chunk in enumerate(probs.split(source.chunk, dim=1)):
        peak = chunk.amax(1, keepdim=True)
        for j in range(launch.MARKS):
            mark = peak * 2.0 ** (-launch.MARK_STEP * (j + 1))
            mass = torch.where(chunk >= mark, chunk, 0.0).sum(1)
            torch.testing.assert_close(found.marked[:, c, j], mass)


def bounds_of(
    source: launch.Source, found: launch.Survey, share: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    rows = len(share)
    out = torch.empty(rows, 2, dtype=torch.int32, device=share.device)
    between_kernel[(rows,)](
        *(found.marked, found.peaks, found.masses, share, floor, out, source.chunks),
        *(launch.CHUNKS, launch.MARKS, launch.MARK_STEP, launch.CHUNKS // 2),
    )
    return out[:, :1].view(torch.float32), out[:, 1:].view(torch.float32)


@pytest.mark.parametrize("share", [1e-3, 0.9, 1 - 1e-6])
@pytest.mark.parametrize("kind", ["0.001", "3"])
def test_a_share_is_reached_between_the_bounds(kind: str, share: float, device: str) -> None:
    probs, source, found = surveyed(kind, device)
    shares = torch.full((len(probs),), share, device=device)
    low, high = bounds_of(source, found, shares, torch.zeros_like(shares))
    wide = probs.double()
    wanted = share * wide.sum(1)
    assert (torch.where(probs >= low, wide, 0.0).sum(1) >= wanted).all()
    assert (torch.where(probs >= high, wide, 0.0).sum(1) < wanted).all()
    # A few marks apart, where they reach so far down.
    near = probs.amax(1, keepdim=True) * 2.0**-8 < low
    assert (high[near] <= low[near] * 2.0 ** (4 * launch.MARK_STEP)).all()


@pytest.mark.parametrize("kind", ["0.001", "3"])
def test_nothing_below_a_floor_is_above_the_bounds(kind: str, device: str) -> None:
    probs, source, found = surveyed(kind, device)
    floor = probs.amax(1) * 0.3
    low, high = bounds_of(source, found, torch.full_like(floor, 0.99), floor)
    assert (low >= floor[:, None]).all()
    assert (high > low).all()
