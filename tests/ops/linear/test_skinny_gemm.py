"""Skinny GEMM kernels: all kinds of widths, rows and strides, with NaN around the operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.ops.linear import skinny_gemm
from cairn.ops.registry import Op
from cairn.ops.testing import Make, compare

SIZES = (
    # Rows and columns that are and are not multiples of tile sizes.
    *((3, 16, 1), (3, 17, 17), (4, 48, 15), (5, 96, 20), (8, 64, 16), (9, 100, 33), (16, 31, 9)),
    # Longer rows, more of them, and both with many tokens.
    *((6, 1040, 10), (16, 64, 1030), (13, 1030, 21)),
)
SPLIT = ((3, 2048, 1), (8, 2048, 8), (11, 3072, 13), (16, 4096, 5))


def poisoned(make: Make, rows: int, width: int, scale: float = 1.0, beside: int = 0) -> Tensor:
    """[rows, width] normal numbers with NaN after the last row and in the row padding."""
    dtype = torch.float32 if make.device == "cpu" else torch.bfloat16
    first = min(beside, 1)
    inside = make.empty(rows + 1, width + beside, dtype=dtype)[:rows, first : first + width]
    return inside.copy_(make.randn(rows, width, dtype=dtype, scale=scale))


def vector(make: Make, width: int) -> Tensor:
    return poisoned(make, 1, width)[0]


def expect_same(op: Op[..., Any], *arguments: Any, changed: int | None = None) -> None:
    """The kernels agree with the definition, and write only to `changed`."""
    assert op.accepts("triton_few", *arguments)
    given = list(arguments)
    if changed is not None:
        given[changed] = arguments[changed].clone()
    wanted, got = op.reference(*given), op.using("triton_few")(*arguments)
    tolerance = (1e-4, 1e-4) if arguments[0].dtype == torch.float32 else (2e-2, 3e-2)
    if wanted is not None:
        compare(got, wanted, tolerance, op.name)
    if changed is not None:
        residual = arguments[changed]
        compare(residual, given[changed], tolerance, op.name)
        size = residual.untyped_storage().nbytes() // residual.element_size()
        around = residual.as_strided((size,), (1,), 0)
        assert int(around.isfinite().sum()) == residual.numel()


@pytest.mark.parametrize("tokens, width, outputs", SIZES)
def test_products_of_some_tokens(make: Make, tokens: int, width: int, outputs: int) -> None:
    x = poisoned(make, tokens, width, beside=8)
    weight = poisoned(make, outputs, width, width**-0.5)
    bias, norm = vector(make, outputs), vector(make, width)
    expect_same(ops.linear, x, weight, bias)
    expect_same(ops.linear, x, weight, bias, norm, 1e-5)
    residual = poisoned(make, tokens, outputs, beside=3)
    expect_same(ops.linear_add, x, residual, weight, bias, changed=1)
    pairs = poisoned(make, 2 * outputs, width, width**-0.5)
    expect_same(ops.gated_linear, x, pairs)
    expect_same(ops.gated_linear, x, pairs, norm)


@pytest.mark.parametrize("tokens, width, outputs", SPLIT)
def test_sums_that_are_split(make: Make, tokens: int, width: int, outputs: int) -> None:
    x = poisoned(make, tokens, width, beside=8)
    weight = poisoned(make, outputs, width, width**-0.5)
    residual = poisoned(make, tokens, outputs, beside=3)
    assert skinny_gemm.accepts_split(x, weight)
    expect_same(ops.linear_add_rmsnorm, x, residual, weight, vector(make, outputs), changed=1)


@pytest.mark.parametrize(
    ("tokens", "width", "outputs", "taken"),
    [
        *((1, 4096, 12288, True), (2, 4096, 12288, True), (3, 4096, 12288, False)),
        *((16, 1024, 8192, True), (17, 1024, 8192, False), (16, 1024, 8200, False)),
        # With padded rows these weights have 21 MB.
        *((3, 2560, 2560, False), (8, 2560, 1024, True), (9, 2560, 1024, False)),
        *((8, 2048, 2048, True), (9, 2048, 2048, False), (9, 2048, 1024, True)),
    ],
)
def test_tiles_take_what_they_are_faster_with(tokens, width, outputs, taken):
    """Thresholds measured on an H100 in bfloat16, against the library's products."""
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight = torch.empty(tokens, width, **meta), torch.empty(outputs, width, **meta)
    assert skinny_gemm.accepts(x, weight) == taken


@pytest.mark.parametrize(("tokens", "taken"), [(1, True), (2, False), (3, False)])
def test_two_tokens_are_added_by_the_library_where_the_weight_is_large(tokens, taken):
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight = torch.empty(tokens, 4096, **meta), torch.empty(4096, 4096, **meta)
    assert skinny_gemm.accepts(x, weight, add=True) == taken
    assert skinny_gemm.accepts(x[:, :1024], weight[:1024, :1024].contiguous(), add=True)


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 64, 65])
def test_a_large_head_is_left_to_the_library_from_three_tokens_on(tokens):
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    x, head = torch.empty(tokens, 1024, **meta), torch.empty(100278, 1024, **meta)
    assert skinny_gemm.accepts(x, head) == (tokens <= 2)
