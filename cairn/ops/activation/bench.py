"""What `cairn bench ops` times of this family."""

from __future__ import annotations

from cairn.ops.activation.gelu_and_mul import gelu_and_mul
from cairn.ops.activation.gelu_quick import gelu_quick
from cairn.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.benching import Draw, Point, Points, flashinfer, moved


@gelu_and_mul.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, 2 * layer.intermediate)
        others = (
            *draw.by_torch(gelu_and_mul.reference),
            *flashinfer("activation.gelu_and_mul"),
        )
        size = f"{layer.name}: {rows} x {layer.intermediate}"
        yield Point(size, draw.args(x), moved(x) * 3 // 2, alternatives=others)


@gelu_quick.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x = draw.randn(rows, width)
        others = draw.by_torch(gelu_quick.reference)
        yield Point(size, draw.args(x), moved(x, x), alternatives=others)


@gelu_tanh_and_mul.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, 2 * layer.intermediate)
        others = (
            *draw.by_torch(gelu_tanh_and_mul.reference),
            *flashinfer("activation.gelu_tanh_and_mul"),
        )
        size = f"{layer.name}: {rows} x {layer.intermediate}"
        yield Point(size, draw.args(x), moved(x) * 3 // 2, alternatives=others)


@silu_and_mul.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, 2 * layer.intermediate)
        others = (
            *draw.by_torch(silu_and_mul.reference),
            *flashinfer("activation.silu_and_mul"),
        )
        size = f"{layer.name}: {rows} x {layer.intermediate}"
        yield Point(size, draw.args(x), moved(x) * 3 // 2, alternatives=others)
