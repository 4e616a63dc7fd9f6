"""hadamard_transform_{12,20,28,40}n against products with full matrices."""

from __future__ import annotations

import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.elementwise.hadamard_blocks import ORDERS, hadamard
from tests.ops.elementwise.test_hadamard_transform import matrix

FIRST_ROWS = {
    12: ("+-++++++++++", "--+-+-+-+-+-", "+++-++----++"),
    20: ("+----+----++--++-++-", "-+----+---+++---+-++"),
    28: ("+------++----++-+--+-+--++--", "-+-----+++-----+-+--+-+--++-"),
    40: ("+-------------------+-------------------", "++-++----+-+-++++--+++-++----+-+-++++--+"),
}
"""Of the published tables."""


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_are_the_published_hadamard_matrices(order: int) -> None:
    h = hadamard(order)
    assert torch.equal(h @ h.T, order * torch.eye(order))
    for row, signs in zip(h, FIRST_ROWS[order], strict=False):
        assert "".join("+" if x > 0 else "-" for x in row) == signs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [4, 16])
def test_against_the_whole_matrix(order: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(order)
    x = torch.randn(2, 3, order * size).to(dtype)
    whole = torch.kron(hadamard(order).double(), matrix(size))
    got = getattr(ops, f"hadamard_transform_{order}n")(x, 0.125)
    assert got.dtype == dtype
    expected = x.double() @ whole.T * 0.125
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=unit, atol=2e-5)


def test_rows_of_other_lengths_are_padded_and_cut() -> None:
    x = torch.randn(2, 50)
    whole = ops.hadamard_transform_12n(torch.nn.functional.pad(x, (0, 46)))
    assert torch.equal(ops.hadamard_transform_12n(x), whole[:, :50])


def test_a_row_without_numbers_is_refused() -> None:
    with pytest.raises(BadArgument, match="hadamard_transform_28n: argument `x` has shape"):
        ops.hadamard_transform_28n(torch.zeros(3, 0))
