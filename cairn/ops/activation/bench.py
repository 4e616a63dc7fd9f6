"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from cairn.ops.activation.gelu_and_mul import gelu_and_mul
from cairn.ops.activation.gelu_quick import gelu_quick
from cairn.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from cairn.ops.activation.sigmoid_gate_mul import sigmoid_gate_mul
from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.activation.silu_and_mul_clamp import silu_and_mul_clamp
from cairn.ops.bench_points import Draw, Point, Points, flashinfer, moved
from cairn.ops.registry import BenchSource


def _gated(name: str) -> BenchSource:
    """Benchmark points of a gated activation, with FlashInfer's function of the same name as an
    alternative."""

    def points(draw: Draw) -> Points:
        for layer, rows in draw.rows():
            x, others = draw.randn(rows, 2 * layer.intermediate), flashinfer(f"activation.{name}")
            size, least = f"{layer.name}: {rows} x {layer.intermediate}", moved(x) * 3 // 2
            yield Point(size, draw.args(x), least, alternatives=others, definition=True)

    return points


gelu_and_mul.bench(_gated("gelu_and_mul"))
gelu_tanh_and_mul.bench(_gated("gelu_tanh_and_mul"))
silu_and_mul.bench(_gated("silu_and_mul"))


@gelu_quick.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x = draw.randn(rows, width)
        yield Point(size, draw.args(x), moved(x, x), definition=True)


@sigmoid_gate_mul.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x, both = (draw.randn(rows, n * layer.heads, layer.head_dim) for n in (1, 2))
        size = f"{layer.name}: {rows} x {layer.heads} x {layer.head_dim}"
        yield Point(size, draw.args(x, both[:, ::2]), moved(x, x, x), definition=True)


@silu_and_mul_clamp.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, 2 * layer.intermediate)
        size = f"{layer.name}: {rows} x {layer.intermediate}"
        yield Point(size, draw.args(x, 10.0), moved(x) * 3 // 2, definition=True)
