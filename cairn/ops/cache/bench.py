"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.cache.cases import _arguments, frames_of
from cairn.ops.cache.decode_slots import LINES, decode_slots
from cairn.ops.cache.resolve_frames import resolve_frames
from cairn.ops.cache.write_kv import write_kv


@decode_slots.bench
def _(draw: Draw) -> Points:
    for rows in (1, 8, 64):
        given = _arguments(draw, rows, 64, rows, 2 * rows)
        least = LINES * moved(given.args[0])
        yield Point(str(rows), given, least, alternatives=draw.by_torch(decode_slots.reference))


@resolve_frames.bench
def _(draw: Draw) -> Points:
    for tokens in (1, 8) if draw.sizes == "tiny" else (1, 8, 512):
        given = frames_of(draw, (tokens, 2, 32), 1 << 14, 1 << 14)
        yield Point(f"{tokens} x 2 x 32", given, 4 * moved(given.args[0]))


def _index_put(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, location: Tensor) -> None:
    """The reference implementation for calls in which every location is written."""
    page, offset = location // k_cache.shape[2], location % k_cache.shape[2]
    k_cache[page, :, offset] = k
    v_cache[page, :, offset] = v


@write_kv.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, size, dim = layer.kv_heads, layer.page_size, layer.head_dim
        pages = rows // size + 64
        k, v = (draw.randn(rows, heads, dim) for _ in range(2))
        caches = [draw.randn(pages, heads, size, dim) for _ in range(2)]
        spot = draw.rand(pages * size).argsort()[:rows]
        yield Point(
            f"{layer.name}: {rows} x {heads} x {dim}",
            draw.args(k, v, *caches, spot),
            moved(k, k, v, v, spot),
            alternatives=(Alternative("index_put", _index_put), *draw.by_torch(write_kv.reference)),
        )
