"""Skinny products on the CPU: any number of columns, and batch invariance."""

from __future__ import annotations

import pytest
import torch

from cairn import ops
from cairn.ops import cpu
from cairn.ops.linear import skinny_gemm_cpu
from cairn.ops.linear.tuning import TUNING
from tests.ops.tables import Tuned

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="Numba is not installed")


@pytest.mark.parametrize("columns", [*range(1, 20), 63, 130, 1000])
@pytest.mark.parametrize("parts", [1, 3, 64])
def test_every_column_is_written_once(columns: int, parts: int, tuned: Tuned) -> None:
    torch.manual_seed(columns)
    x, weight = torch.randn(2, 40), torch.randn(2 * columns, 40) / 6
    tuned(TUNING, cpu_part_bytes=-(-weight.nbytes // parts))
    residual = torch.randn(2, 2 * columns)
    wanted = residual + x @ weight.T
    ops.linear_add.using("numba")(x, residual, weight)
    torch.testing.assert_close(residual, wanted)
    wanted = torch.nn.functional.silu(x @ weight[:columns].T) * (x @ weight[columns:].T)
    torch.testing.assert_close(ops.gated_linear.using("numba")(x, weight), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    most = skinny_gemm_cpu.MAX_ROWS[dtype]
    x, weight, norm = torch.randn(most, 48), torch.randn(33, 48), torch.randn(48)
    x, weight, norm = x.to(dtype), weight.to(dtype), norm.to(dtype)
    together = ops.linear(x, weight, None, norm)
    for row in range(most):
        assert torch.equal(ops.linear(x[row : row + 1], weight, None, norm)[0], together[row])
        assert torch.equal(ops.linear(x[row], weight, None, norm), together[row])


def test_implementations_by_number_of_rows() -> None:
    weight = torch.randn(9, 48)
    for dtype, most in skinny_gemm_cpu.MAX_ROWS.items():
        given = weight.to(dtype)
        assert ops.linear.choice(torch.empty(most, 48, dtype=dtype), given) == "numba"
        assert ops.linear.choice(torch.empty(most + 1, 48, dtype=dtype), given) == "composed"
        assert ops.linear.choice(torch.empty(0, 48, dtype=dtype), given) == "composed"
    assert ops.linear.choice(torch.empty(1, 48), torch.randn(48, 9).T) == "composed"


def test_a_gate_of_large_numbers() -> None:
    x = torch.tensor([[1.0]])
    weight = torch.tensor([[200.0], [-200.0], [-1e30], [2.0], [3.0], [4.0]])
    assert ops.gated_linear.using("numba")(x, weight).tolist() == [[400.0, 0.0, 0.0]]
