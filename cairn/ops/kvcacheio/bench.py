"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.checks import INT64
from cairn.ops.kvcacheio.copy_slots import copy_slots
from cairn.ops.kvcacheio.ring_read import ring_read
from cairn.ops.kvcacheio.ring_write import ring_write


def _index_copy(
    source: Tensor, target: Tensor, src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor
) -> None:
    """torch's operators on rows, for layers of one layout."""
    dst_k.index_copy_(0, target, src_k[source])
    dst_v.index_copy_(0, target, src_v[source])


@copy_slots.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        item = layer.kv_heads * layer.head_dim * draw.dtype.itemsize
        slots = 2 * rows + 64
        caches = [draw.randn(slots, item // draw.dtype.itemsize) for _ in range(4)]
        source, target = (draw.rand(slots).argsort()[:rows] for _ in range(2))
        plain = draw.args(source, target, *caches)
        yield Point(
            f"{layer.name}: {rows} x {item} bytes",
            draw.args(source, target, *caches, item, 1, 0, [item, 1, 1], [item, 1, 1]),
            4 * rows * item,
            alternatives=(Alternative("index_copy", _index_copy, plain),),
        )


@ring_read.bench
def _(draw: Draw) -> Points:
    for rows in (1, 8, 64):
        ring = draw.randint(0, 1 << 40, 4, 4, rows)
        given = draw.args(ring[0].clone(), ring, draw.tensor([3], torch.int64))
        yield Point(f"4 x {rows}", given, 2 * moved(ring[0]))


@ring_write.bench
def _(draw: Draw) -> Points:
    for rows in (1, 8, 64):
        values = draw.randint(0, 1 << 40, rows)
        ring, count = draw.randint(0, 1, 4, 2 * rows), draw.tensor([3], INT64[0])
        kept = draw.args(draw.randint(0, 1, rows + 1), draw.arange(rows))
        yield Point(str(rows), draw.args(values, ring, count, *kept.args), 4 * moved(values))
