"""top-k, top-p and min-p against loops over sorted Python floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.ops import gpu, min_p_renorm_probs, top_k_renorm_probs
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm
from tests.ops.sampling.variants import interpreted, runnable_on

BIG = 20_000


def keep_top_k(row: list[float], k: float) -> set[int]:
    if k < 1 or k >= len(row):
        return set(range(len(row)))
    threshold = sorted(row, reverse=True)[int(k) - 1]
    return {token for token, p in enumerate(row) if p >= threshold}


def keep_top_p(row: list[float], p: float) -> set[int]:
    if p >= 1:
        return set(range(len(row)))
    kept: set[int] = set()
    before = 0.0
    for token in sorted(range(len(row)), key=lambda t: (-row[t], t)):
        if kept and before >= p:
            break
        kept.add(token)
        before += row[token]
    return kept


def keep_min_p(row: list[float], p: float) -> set[int]:
    # The product is rounded to float32, as that of tensors.
    threshold = float(torch.tensor(max(row)) * torch.tensor(p))
    return {token for token, value in enumerate(row) if value >= threshold}


def expect(
    probs: Tensor, parameter: Tensor, keep: Callable[[list[float], float], set[int]]
) -> Tensor:
    result = torch.zeros_like(probs, dtype=torch.float64)
    for row, (values, p) in enumerate(zip(probs.tolist(), parameter.tolist(), strict=True)):
        kept = sorted(keep(values, p))
        mass = sum(values[t] for t in kept)
        for token in kept:
            result[row, token] = values[token] / mass
    return result


def assert_filtered(
    op: Any, probs: Tensor, parameter: Tensor, keep: Any, only: str, device: str
) -> None:
    """Check all implementations that are not interpreted, or one by name."""
    expected = expect(probs, parameter, keep)
    names = [name for name in runnable_on(op, device) if not interpreted(name, device)]
    for name in [only] if only else names:
        own = probs.to(device)
        got = op.using(name)(own, parameter.to(device)).cpu()
        assert torch.equal(own.cpu(), probs)
        assert torch.equal(got > 0, expected > 0), name
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0.0)


rows = st.lists(
    st.lists(st.integers(0, 6), min_size=5, max_size=5).filter(any), min_size=1, max_size=4
)


def assert_small_rows(
    weights: list[list[int]], data: st.DataObject, name: str, device: str
) -> None:
    # Divided by 32, sums are exact, so equality with p is decided the same way everywhere.
    probs = torch.tensor(weights, dtype=torch.float32) / 32
    count = len(weights)
    k = torch.tensor(data.draw(st.lists(st.integers(-1, 6), min_size=count, max_size=count)))
    p = data.draw(st.lists(st.integers(0, 33), min_size=count, max_size=count))
    p_tensor = torch.tensor(p, dtype=torch.float32) / 32
    assert_filtered(top_k_renorm, probs, k, keep_top_k, name, device)
    assert_filtered(top_p_renorm, probs, p_tensor, keep_top_p, name, device)
    assert_filtered(min_p_renorm_probs, probs, p_tensor.clamp_max(1), keep_min_p, name, device)


@settings(max_examples=60, deadline=None)
@given(weights=rows, data=st.data())
def test_small_rows_with_many_ties(
    weights: list[list[int]], data: st.DataObject, device: str
) -> None:
    assert_small_rows(weights, data, "", device)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@settings(max_examples=8, deadline=None)
@given(weights=rows, data=st.data())
def test_small_rows_with_many_ties_when_interpreted(
    weights: list[list[int]], data: st.DataObject
) -> None:
    assert_small_rows(weights, data, "triton", "cpu")


@pytest.mark.parametrize(
    "sharpness", [0.0, 1.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.01, 4.0, 30.0))]
)
def test_large_vocabulary(sharpness: float, device: str) -> None:
    torch.manual_seed(int(sharpness))
    probs = torch.softmax(torch.randn(4, BIG) * sharpness, dim=-1)
    p = torch.tensor([0.9, 0.1, 0.999, 1.0])
    assert_filtered(top_p_renorm, probs, p, keep_top_p, "", device)
    k = torch.tensor([1, 50, 5000, BIG], dtype=torch.int32)
    assert_filtered(top_k_renorm, probs, k, keep_top_k, "", device)
    least = torch.tensor([0.0, 0.1, 0.9, 1.0])
    assert_filtered(min_p_renorm_probs, probs, least, keep_min_p, "", device)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_long_lists_when_interpreted() -> None:
    # Flat rows: hundreds of candidates in each of three chunks, half of them with ties.
    torch.manual_seed(8)
    half = torch.randn(2, 700)
    probs = torch.softmax(torch.cat([half, half], dim=1), dim=-1)
    p, k = torch.tensor([0.6, 0.9]), torch.tensor([30, 701])
    assert_filtered(top_p_renorm, probs, p, keep_top_p, "triton", "cpu")
    assert_filtered(top_k_renorm, probs, k, keep_top_k, "triton", "cpu")


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_lists_of_lines_when_interpreted() -> None:
    # The top k are in few of the 48 lines, or in all; one row has all its largest values in one
    # line.
    torch.manual_seed(9)
    probs = torch.softmax(4 * torch.randn(4, 3000), dim=-1)
    probs[1, 16:32] = torch.linspace(0.5, 0.6, 16)
    probs[2] = (torch.arange(3000) % 5 == 0) / 600
    k = torch.tensor([20, 17, 30, 48])
    assert_filtered(top_k_renorm, probs, k, keep_top_k, "triton", "cpu")


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_shares_of_peaked_and_of_flat_rows_when_interpreted() -> None:
    # Weights over many powers of two, over one, and one that has all but 1e-4 of the mass.
    torch.manual_seed(10)
    probs = torch.softmax(torch.tensor([[9.0], [0.2], [1.0]]) * torch.randn(3, 2100), dim=-1)
    probs[2] *= 1e-4
    probs[2, 1000] = 1 - 1e-4
    for share in (0.0, 0.3, 0.99, 0.99995):
        p = torch.full((3,), share)
        assert_filtered(top_p_renorm, probs, p, keep_top_p, "triton", "cpu")


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_neighbouring_floats_when_interpreted() -> None:
    # 100 copies of one float and 150 of the next: the search ends between them, and within the
    # first.
    low = torch.full((1, 251), 2.0**-9)
    high = torch.nextafter(low, torch.ones(1))
    probs = torch.where(torch.arange(251) % 5 < 2, low, high)
    for share in (0.3, 0.9):
        p = torch.tensor([share * float(probs.double().sum())])
        assert_filtered(top_p_renorm, probs, p, keep_top_p, "triton", "cpu")


def test_rows_do_not_disturb_each_other(device: str) -> None:
    probs = torch.softmax(torch.randn(5, 3000) * torch.tensor([[0.1], [1], [3], [6], [9]]), -1)
    probs = probs.to(device)
    p = torch.tensor([0.5, 1.0, 0.9, 0.99, 0.0], device=device)
    k = torch.tensor([1, 0, 7, 2999, 300], device=device)
    for op, parameter in ((top_p_renorm, p), (top_k_renorm, k)):
        whole = op(probs, parameter)
        for row in range(5):
            alone = op(probs[row : row + 1], parameter[row : row + 1])
            assert torch.equal(alone[0], whole[row])


def test_a_row_that_several_threads_would_sum_up_is_as_among_others() -> None:
    torch.manual_seed(4)
    probs = torch.rand(2, 100_278).softmax(-1)
    half = torch.full((2,), 0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for op, parameter in (
            (top_p_renorm, half),
            (min_p_renorm_probs, half),
            (top_k_renorm, torch.full((2,), 50_000)),
        ):
            whole = op(probs, parameter)
            for row in range(2):
                at = slice(row, row + 1)
                assert torch.equal(op(probs[at], parameter[at])[0], whole[row]), op.name
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("k", [1 << 31, 1 << 62, -(1 << 40), 0, 4])
def test_any_number_of_tokens_may_be_kept(k: int, device: str) -> None:
    probs = torch.full((2, 4), 0.25, device=device)
    assert torch.equal(top_k_renorm_probs(probs, k), probs)


def test_one_token_with_all_mass_and_rows_without_any(device: str) -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], device=device)
    half, one = (
        torch.full((2,), 0.5, device=device),
        torch.ones(2, dtype=torch.int64, device=device),
    )
    for op, parameter in (
        (top_p_renorm, half),
        (min_p_renorm_probs, half),
        (top_k_renorm, one),
    ):
        for name in runnable_on(op, device):
            assert torch.equal(op.using(name)(probs, parameter), probs), name
