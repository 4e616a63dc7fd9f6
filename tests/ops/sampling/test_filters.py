"""top-k, top-p and min-p against loops over sorted Python floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.ops import min_p_renorm_probs, top_k_renorm_probs, top_p_renorm_probs

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
    # The product is a float32 one: tensors times tensors.
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


def assert_filtered(op: Any, probs: Tensor, parameter: Tensor, keep: Any) -> None:
    expected = expect(probs, parameter, keep)
    for name in ("reference", *op.implementations):
        before = probs.clone()
        got = op.using(name)(probs, parameter)
        assert torch.equal(probs, before)
        assert torch.equal(got > 0, expected > 0), name
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0.0)


rows = st.lists(
    st.lists(st.integers(0, 6), min_size=5, max_size=5).filter(any), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(rows, st.data())
def test_small_rows_with_many_ties(weights: list[list[int]], data: st.DataObject) -> None:
    # Divided by 32, sums are exact, so equality with p is decided the same way everywhere.
    probs = torch.tensor(weights, dtype=torch.float32) / 32
    count = len(weights)
    k = data.draw(st.lists(st.integers(-1, 6), min_size=count, max_size=count))
    assert_filtered(top_k_renorm_probs, probs, torch.tensor(k), keep_top_k)
    p = data.draw(st.lists(st.integers(0, 33), min_size=count, max_size=count))
    p_tensor = torch.tensor(p, dtype=torch.float32) / 32
    assert_filtered(top_p_renorm_probs, probs, p_tensor, keep_top_p)
    assert_filtered(min_p_renorm_probs, probs, p_tensor.clamp_max(1), keep_min_p)


@pytest.mark.parametrize("sharpness", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_large_vocabulary(sharpness: float) -> None:
    torch.manual_seed(int(sharpness))
    probs = torch.softmax(torch.randn(4, BIG) * sharpness, dim=-1)
    p = torch.tensor([0.9, 0.1, 0.999, 1.0])
    assert_filtered(top_p_renorm_probs, probs, p, keep_top_p)
    k = torch.tensor([1, 50, 5000, BIG], dtype=torch.int32)
    assert_filtered(top_k_renorm_probs, probs, k, keep_top_k)
    assert_filtered(min_p_renorm_probs, probs, torch.tensor([0.0, 0.1, 0.9, 1.0]), keep_min_p)


def test_rows_do_not_disturb_each_other() -> None:
    probs = torch.softmax(torch.randn(5, 3000) * torch.tensor([[0.1], [1], [3], [6], [9]]), -1)
    p, k = torch.tensor([0.5, 1.0, 0.9, 0.99, 0.0]), torch.tensor([1, 0, 7, 2999, 300])
    for op, parameter in ((top_p_renorm_probs, p), (top_k_renorm_probs, k)):
        whole = op(probs, parameter)
        for row in range(5):
            alone = op(probs[row : row + 1], parameter[row : row + 1])
            assert torch.equal(alone[0], whole[row])


def test_one_token_with_all_mass_and_rows_without_any() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for op in (top_p_renorm_probs, min_p_renorm_probs):
        assert torch.equal(op(probs, torch.tensor([0.5, 0.5])), probs)
    assert torch.equal(top_k_renorm_probs(probs, torch.tensor([1, 1])), probs)
