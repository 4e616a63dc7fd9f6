"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.memory.set_kv_buffer_kernel import set_kv_buffer_kernel
from cairn.ops.memory.take_rows import take_rows


def _index_put(k_cache: Tensor, v_cache: Tensor, loc: Tensor, k: Tensor, v: Tensor) -> None:
    k_cache[loc] = k
    v_cache[loc] = v


@set_kv_buffer_kernel.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        shape = (layer.kv_heads, layer.head_dim)
        caches = [draw.randn(rows + 4096, *shape) for _ in range(2)]
        k, v = (draw.randn(rows, *shape) for _ in range(2))
        loc = draw.rand(rows + 4096).argsort()[:rows]
        yield Point(
            f"{layer.name}: {rows} x {layer.kv_heads} x {layer.head_dim}",
            draw.args(*caches, loc, k, v),
            moved(k, k, v, v, loc),
            alternatives=(Alternative("index_put", _index_put),),
        )


@take_rows.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        table = draw.randn(layer.vocabulary, layer.hidden)
        index = draw.randint(0, layer.vocabulary, rows)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden}",
            draw.args(table, index),
            moved(index) + 2 * moved(table[:1]) * rows,
            definition=True,
        )
