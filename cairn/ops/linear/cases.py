"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.linear.dsv3_gemms import dsv3_fused_a_gemm, dsv3_router_gemm
from cairn.ops.linear.fp8_blockwise_scaled_mm import fp8_blockwise_scaled_mm
from cairn.ops.linear.gated_linear import gated_linear
from cairn.ops.linear.linear import linear
from cairn.ops.linear.linear_add import linear_add
from cairn.ops.linear.linear_add_rmsnorm import linear_add_rmsnorm
from cairn.ops.linear.linear_fp8_blocks import linear_fp8_blocks
from cairn.ops.linear.scaled_mm import E5M2, bmm_fp8, fp8_scaled_mm, int8_scaled_mm
from cairn.ops.linear.tuning import TUNING
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.testing import Cases, Make


@gated_linear.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width, outputs in (
            *((1, 64, 9), (2, 48, 33), (5, 96, 20), (17, 64, 32)),
            *((64, 512, 96), (90, 128, 64), (70, 48, 5)),
        ):
            weight = make.randn(2 * outputs, width, dtype=dtype, scale=width**-0.5)
            x = make.randn(rows, width, dtype=dtype)
            yield make.args(x, weight)
            yield make.args(x, weight, make.randn(width, dtype=dtype), 1e-5)
    yield make.args(make.randn(0, 64), make.randn(18, 64))
    if make.device != "cpu":
        # A weight large enough for the streaming kernel on a GPU.
        weight = make.randn(2 * 3100, 1400, dtype=torch.bfloat16, scale=0.03)
        yield make.args(make.randn(19, 1400, dtype=torch.bfloat16), weight)


@linear.cases
def _(make: Make) -> Cases:
    sizes = ((1, 64, 9), (2, 48, 33), (5, 96, 20), (16, 32, 8), (70, 48, 5))
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width, outputs in sizes:
            weight = make.randn(outputs, width, dtype=dtype, scale=width**-0.5)
            x, bias = make.randn(rows, width, dtype=dtype), make.randn(outputs, dtype=dtype)
            yield make.args(x, weight, bias)
            yield make.args(x, weight, None, make.randn(width, dtype=dtype), 1e-5, torch.float32)
    # A wide vocabulary head, for more tokens than one tile.
    outputs = TUNING.skinny_many_rows + 5
    for rows, dtype in ((17, torch.float32), (40, torch.bfloat16)):
        weight = make.randn(outputs, 64, dtype=dtype, scale=0.125)
        x, bias = make.randn(rows, 64, dtype=dtype), make.randn(outputs, dtype=dtype)
        yield make.args(x, weight, bias, make.randn(64, dtype=dtype), 1e-6, torch.float32)
    for rows, width, outputs, dtype in (
        (17, 512, 48, torch.float32),
        (70, 512, 96, torch.bfloat16),
    ):
        weight = make.randn(outputs, width, dtype=dtype, scale=width**-0.5)
        x, norm = (
            make.randn(rows, width + 8, dtype=dtype)[:, :width],
            make.randn(width, dtype=dtype),
        )
        yield make.args(x, weight)
        yield make.args(x, weight, None, norm, 1e-5, torch.float32)
    wide = make.randn(2, 3, 128)[..., :64]
    yield make.args(wide, make.randn(7, 64))
    yield make.args(wide[:, 0], make.randn(7, 64))
    yield make.args(make.randn(0, 64), make.randn(7, 64))
    if make.device != "cpu":
        # A weight large enough for the streaming kernel on a GPU.
        weight = make.randn(6200, 1400, dtype=torch.bfloat16, scale=0.03)
        yield make.args(make.randn(19, 1400, dtype=torch.bfloat16), weight)


@linear_add.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width, outputs in ((1, 64, 9), (2, 48, 33), (5, 96, 20), (70, 48, 5)):
            weight = make.randn(outputs, width, dtype=dtype, scale=width**-0.5)
            x = make.randn(rows, width, dtype=dtype)
            residual = make.randn(rows, outputs, dtype=dtype)
            yield make.args(x, residual, weight)
            yield make.args(x, residual, weight, make.randn(outputs, dtype=dtype))
    yield make.args(make.randn(3, 128)[:, :64], make.randn(3, 20)[:, 3:12], make.randn(9, 64))
    yield make.args(make.randn(0, 64), make.randn(0, 9), make.randn(9, 64))
    if make.device != "cpu":
        # A weight large enough for the streaming kernel on a GPU.
        weight = make.randn(1000, 8400, dtype=torch.bfloat16, scale=0.01)
        x, residual = (make.randn(19, n, dtype=torch.bfloat16) for n in (8400, 1000))
        yield make.args(x, residual, weight)


@linear_add_rmsnorm.cases
def _(make: Make) -> Cases:
    few = ((2, 48, 33), (3, 2048, 13), (17, 128, 64), (130, 64, 64))
    # Reductions are kept short: longer ones in another order would differ by more than the
    # tolerance of float32.
    more = ((16, 4096, 40), (40, 512, 192), (64, 4096, 64), (100, 512, 128))
    for dtype, sizes in ((torch.float32, few), (torch.bfloat16, few + more)):
        for rows, width, outputs in sizes:
            weight = make.randn(outputs, width, dtype=dtype, scale=width**-0.5)
            x, norm = make.randn(rows, width, dtype=dtype), make.randn(outputs, dtype=dtype)
            residual = make.randn(rows, outputs, dtype=dtype)
            yield make.args(x, residual, weight, norm)
            yield make.args(x, residual, weight, norm, make.randn(outputs, dtype=dtype), 1e-5)
    wide = make.randn(5, 3072)[:, :2048], make.randn(5, 26)[:, 1:14]
    yield make.args(*wide, make.randn(13, 2048, scale=0.02), make.randn(13))
    wide = make.randn(70, 128)[:, :64], make.randn(70, 130)[:, 1:65]
    yield make.args(*wide, make.randn(64, 64, scale=0.1), make.randn(64))
    yield make.args(make.randn(0, 64), make.randn(0, 9), make.randn(9, 64), make.randn(9))
    if make.device != "cpu":
        # A weight large enough for the streaming kernel on a GPU.
        weight = make.randn(1000, 8400, dtype=torch.bfloat16, scale=0.01)
        shapes = (19, 8400), (19, 1000), (1000,)
        x, residual, norm = (make.randn(*shape, dtype=torch.bfloat16) for shape in shapes)
        yield make.args(x, residual, weight, norm)


def _blocks(make: Make, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """A weight [rows, width] in e4m3 and the scales of its blocks."""
    codes = make.randn(rows, width, scale=60.0).to(E4M3)
    shape = (blocks.count(rows), blocks.count(width))
    return codes, (0.5 + make.rand(*shape)) / 60.0 * width**-0.5


@linear_fp8_blocks.cases
def _(make: Make) -> Cases:
    for rows, width, outputs, dtype in (
        (1, 128, 48, torch.float32),
        (3, 160, 140, torch.float32),
        (40, 256, 136, torch.bfloat16),
        (200, 384, 272, torch.bfloat16),
    ):
        yield make.args(make.randn(rows, width, dtype=dtype), *_blocks(make, outputs, width))
    wide = make.randn(5, 512, dtype=torch.bfloat16)[:, :256]
    yield make.args(wide, *_blocks(make, 48, 256))
    yield make.args(make.randn(0, 128), *_blocks(make, 48, 128))


@fp8_blockwise_scaled_mm.cases
def _(make: Make) -> Cases:
    for rows, width, outputs, dtype in (
        (2, 128, 48, torch.float32),
        (5, 160, 140, torch.float32),
        (200, 384, 272, torch.bfloat16),
    ):
        weight, scale = _blocks(make, outputs, width)
        x, own = blocks.quantized(make.randn(rows, width))
        yield make.args(x, weight.t(), own, scale.t(), dtype)
        # Scales stored column-major: those of neighbouring rows are adjacent.
        yield make.args(x, weight.t(), own.t().contiguous().t(), scale.t(), dtype)
    yield make.args(x[:0], weight.t(), own[:0], scale.t(), torch.bfloat16)


@dsv3_fused_a_gemm.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 7):
            weight = make.randn(40, 96, dtype=dtype, scale=0.1)
            yield make.args(make.randn(rows, 96, dtype=dtype), weight.t())
    yield make.args(make.randn(0, 64), make.randn(8, 64).t())


@dsv3_router_gemm.cases
def _(make: Make) -> Cases:
    for dtype, out in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        weight = make.randn(24, 96, dtype=dtype, scale=0.1)
        yield make.args(make.randn(7, 96, dtype=dtype), weight, out)
    yield make.args(make.randn(1, 96, dtype=dtype), weight)
    yield make.args(make.randn(0, 64), make.randn(8, 64), torch.float32)


@fp8_scaled_mm.cases
def _(make: Make) -> Cases:
    for rows, width, outputs, dtype in (
        (3, 64, 24, torch.float32),
        (1, 160, 40, torch.float32),
        (40, 256, 136, torch.bfloat16),
        (300, 384, 272, torch.bfloat16),
    ):
        x, weight = make.randn(rows, width).to(E4M3), make.randn(outputs, width).to(E4M3)
        of_rows, of_numbers = make.rand(rows, 1), make.rand(1, outputs) * width**-0.5
        bias = make.randn(outputs, dtype=dtype)
        yield make.args(x, weight.t(), of_rows, of_numbers, dtype)
        yield make.args(x, weight.t(), of_rows[:1, 0], of_numbers[0], dtype, bias)
    yield make.args(x[:0], weight.t(), of_rows[:0], of_numbers, torch.bfloat16)


@int8_scaled_mm.cases
def _(make: Make) -> Cases:
    for rows, width, outputs, dtype in (
        (3, 64, 24, torch.float32),
        (1, 160, 40, torch.float32),
        (40, 256, 136, torch.bfloat16),
        (300, 384, 272, torch.bfloat16),
    ):
        x = make.randint(-128, 128, rows, width, dtype=torch.int8)
        weight = make.randint(-128, 128, outputs, width, dtype=torch.int8)
        of_rows, of_numbers = make.rand(rows) / 64, make.rand(outputs) / 64 * width**-0.5
        bias = make.randn(outputs, dtype=dtype)
        yield make.args(x, weight.t(), of_rows, of_numbers, dtype)
        yield make.args(x, weight.t(), of_rows.view(-1, 1), of_numbers[:1], dtype, bias)
    yield make.args(x[:0], weight.t(), of_rows[:0], of_numbers, torch.bfloat16)


@bmm_fp8.cases
def _(make: Make) -> Cases:
    scales = make.tensor([0.5]), make.tensor(0.25)
    for kinds in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)):
        a, b = make.randn(2, 5, 32).to(kinds[0]), make.randn(2, 24, 32).to(kinds[1])
        yield make.args(a, b.transpose(1, 2), *scales, torch.float32)
        out = make.empty(2, 5, 24, dtype=torch.bfloat16)
        yield make.args(a, b.transpose(1, 2), *scales, torch.bfloat16, out=out)
    yield make.args(a[:, :0], b.transpose(1, 2), *scales, torch.bfloat16)
