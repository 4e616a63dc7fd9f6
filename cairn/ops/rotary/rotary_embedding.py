"""Rotary position embedding (Su et al. 2021, equation 34), applied in place."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.call import Call
from cairn.ops.registry import op
from cairn.ops.rotary import launch
from cairn.ops.testing import Cases, Make


@op(mutates=("query", "key"))
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """What the function of this name in `rotated` does, without a result.

    An op may not return its arguments.
    """
    cos_sin = cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = cos_sin.chunk(2, dim=-1)
    launch.rotate(query, cos, sin, head_size, is_neox)
    if key is not None:
        launch.rotate(key, cos, sin, head_size, is_neox)


@rotary_embedding.check
def _(call: Call) -> None:
    launch.check(
        "rotary_embedding", call.positions, call.query, call.key, call.head_size, call.cos_sin_cache
    )


def _plain(call: Call) -> bool:
    return launch.accepts(call.positions, call.query, call.key, call.head_size, call.cos_sin_cache)


@rotary_embedding.implementation("triton", devices=gpu.DEVICES, when=_plain, replayed=True)
def _(call: Call) -> None:
    launch.launch(
        call.positions, call.query, call.key, call.head_size, call.cos_sin_cache, call.is_neox
    )


@rotary_embedding.cases
def _(make: Make) -> Cases:
    half = torch.bfloat16
    cache = make.randn(50, 16)
    positions = make.randint(0, 50, 7)
    yield make.args(positions, make.randn(7, 4, 16), make.randn(7, 2, 16), 16, cache)
    yield make.args(positions, make.randn(7, 64), None, 16, cache, is_neox=False)
    query, key = make.randn(7, 3, 24, dtype=half), make.randn(7, 1, 24, dtype=half)
    yield make.args(positions, query, key, 24, cache)
    query, key = make.randn(7, 48, dtype=half), make.randn(7, 24, dtype=half)
    yield make.args(positions, query, key, 24, cache.to(half), False)
    fused = make.randn(7, 96)
    yield make.args(positions, fused[:, :64], fused[:, 64:], 16, cache)
    batch = make.randint(0, 50, 2, 3)
    yield make.args(batch, make.randn(2, 3, 32), make.randn(2, 3, 2, 16), 16, cache)
    yield make.args(make.arange(0), make.randn(0, 2, 16), None, 16, cache)


@rotary_embedding.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        dim = layer.head_dim
        positions, angles = draw.randint(0, 8192, rows), draw.rand(8192, dim)
        q, k = draw.randn(rows, layer.heads * dim), draw.randn(rows, layer.kv_heads * dim)
        yield Point(
            f"{layer.name}: {rows} x {layer.heads} + {layer.kv_heads} x {dim}",
            draw.args(positions, q, k, dim, angles),
            moved(q, q, k, k, positions) + 4 * rows * dim,
            alternatives=draw.by_torch(rotary_embedding.reference),
        )
