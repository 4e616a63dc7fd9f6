"""Expert kernels with changed tuning constants, so that short inputs run the code paths of long
ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.ops import gpu
from cairn.ops.moe.tuning import TUNING, Tile
from cairn.ops.registry import Op
from cairn.ops.testing import cases_of, check
from tests.ops.tables import Tuned

pytestmark = pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton without CUDA")
TABLES = (True, False)


def check_cases(op: Op[..., Any]) -> None:
    taken = 0
    for case in cases_of(op):
        halves = (x.dtype == torch.bfloat16 for x in case.args if isinstance(x, Tensor))
        if not any(halves) and op.accepts("triton", *case.args, **case.kwargs):
            check(op, "triton", case)
            taken += 1
    assert taken


@pytest.mark.parametrize("op", [ops.moe_align_block_size, ops.prepare_moe_input], ids=str)
def test_several_programs_sort(op: Op[..., Any], tuned: Tuned) -> None:
    tuned(TUNING, sort_pairs=0, sort_chunk=16, sort_step=8, sort_counts=32)
    check_cases(op)


@pytest.mark.parametrize("table", TABLES)
def test_tiles_of_many_rows(table: bool, tuned: Tuned) -> None:
    plain = Tile(16, 16, 16, 4, 2, 2, table)
    coded = Tile(16, 128, 128, 4, 2, 2, table)
    tiles = {"32": ((1, plain, plain),), "8": ((1, coded, coded),)}
    tuned(TUNING, tiles=tiles, single_pairs=0)
    check_cases(ops.fused_experts)
    check_cases(ops.linear_fp8_blocks)
    check_cases(ops.fp8_blockwise_scaled_grouped_mm)


def test_experts_that_no_token_has_are_not_read(tuned: Tuned) -> None:
    torch.manual_seed(2)
    x, w1, w2 = torch.randn(5, 16), torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    ids, weights = torch.tensor([[0, 2], [2, -1], [0, 2], [-1, -1], [2, 0]]), torch.rand(5, 2)
    wanted = ops.fused_experts.using("reference")(x, w1, w2, weights, ids)
    w1[1], w2[3] = torch.nan, torch.nan
    for places in (0, 16):
        tuned(TUNING, single_pairs=places)
        got = ops.fused_experts.using("triton")(x, w1, w2, weights, ids)
        torch.testing.assert_close(got, wanted)


def test_a_product_quantises_short_rows_itself(tuned: Tuned) -> None:
    torch.manual_seed(3)
    x, ids, weights = torch.randn(3, 256), torch.tensor([[0, 1], [1, -1], [1, 0]]), torch.rand(3, 2)
    w1, w2 = (
        torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((2, 256, 256), (2, 256, 128))
    )
    scales = {"w1_scale": torch.rand(2, 2, 2), "w2_scale": torch.rand(2, 2, 1)}
    found = []
    for widest in (0, 256):
        tuned(TUNING, quantized_inside=widest)
        found.append(
            (
                ops.fused_experts.using("triton")(x, w1, w2, weights, ids, **scales),
                ops.linear_fp8_blocks.using("triton")(x, w1[0], scales["w1_scale"][0]),
            )
        )
    for separate, inside in zip(*found, strict=True):
        assert torch.equal(separate, inside)


def test_one_row_needs_no_tile(tuned: Tuned) -> None:
    torch.manual_seed(4)
    x, w = torch.randn(1, 384), torch.randn(200, 384).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3)
    wanted = ops.linear_fp8_blocks.using("reference")(x, w, scale)
    for widest in (0, 384):
        tuned(TUNING, vector_width=widest, vector_bytes=1 << 11)
        got = ops.linear_fp8_blocks.using("triton")(x, w, scale)
        torch.testing.assert_close(got, wanted)
