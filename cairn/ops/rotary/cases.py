"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.rotary.apply_rope_with_cos_sin_cache_inplace import rotary_set_kv
from cairn.ops.rotary.fused_qk_norm_rope import fused_qk_norm_rope
from cairn.ops.rotary.head_norm_rope import head_norm_rope
from cairn.ops.rotary.head_squares import head_squares
from cairn.ops.rotary.heads_into_cache import SPREAD_TOKENS, heads_into_cache
from cairn.ops.rotary.rotary_cos_sin import rotary_cos_sin
from cairn.ops.rotary.rotary_embedding import rotary_embedding
from cairn.ops.rotary.split_norm_rope import BLOCK_TOKENS, split_norm_rope
from cairn.ops.testing import Cases, Make


@rotary_set_kv.cases
def _(make: Make) -> Cases:
    spot = make.tensor([8, 0, 3, 11, -1, 2, 7], torch.int64)
    positions = make.randint(0, 50, 7, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        cache = make.randn(50, 16)
        buffers = [make.randn(12, 2, 16, dtype=dtype) for _ in range(2)]
        q, k = make.randn(7, 4, 16, dtype=dtype), make.randn(7, 2, 16, dtype=dtype)
        value = make.randn(7, 32, dtype=dtype)
        yield make.args(positions, q, k, 16, cache, value, *buffers, spot)
        fused = make.randn(7, 24 * 5, dtype=dtype)
        q, k, value = fused[:, :72], fused[:, 72:96], fused[:, 96:]
        buffers = [make.randn(12, 24, dtype=dtype) for _ in range(2)]
        given = (positions, q, k, 24, cache, value, *buffers, spot.int())
        yield make.args(*given, 0.5, 4.0, is_neox=False)
        q, k = make.randn(2, 1, 7, dtype=dtype), make.randn(2, 3, 9, dtype=dtype)[..., :7]
        buffers = [make.randn(4, 3, 7, dtype=dtype), make.randn(4, 3, 5, dtype=dtype)]
        value = make.randn(2, 3, 5, dtype=dtype)
        yield make.args(positions[:2], q, k, 7, cache[:, :4], value, *buffers, spot[1:3], 0.3)
    eight = [make.randn(12, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    q, k = make.randn(7, 4, 16, scale=300.0), make.randn(7, 2, 16, scale=300.0)
    yield make.args(positions, q, k, 16, cache, make.randn(7, 32), *eight, spot)
    none = make.arange(0)
    empty = (make.randn(0, 64), make.randn(0, 32))
    buffers = [make.randn(12, 32) for _ in range(2)]
    yield make.args(none, *empty, 16, cache, make.randn(0, 32), *buffers, none)


@fused_qk_norm_rope.cases
def _(make: Make) -> Cases:
    plain, yarn = (1.0, 1.0, 32.0, 1.0), (2.5, 1.0, 5.0, 0.9)
    for dtype in (torch.float32, torch.bfloat16):
        weights = make.randn(16, dtype=dtype), make.randn(16, dtype=dtype)
        spot = make.randint(0, 300, 5, dtype=torch.int32)
        given = (4, 2, 2, 16, 1e-5, *weights, 10000.0)
        yield make.args(make.randn(5, 128, dtype=dtype), *given, True, spot, *plain)
        yield make.args(make.randn(5, 128, dtype=dtype), *given, False, spot.long(), *yarn, 8)
        weights = make.randn(24), make.randn(24)
        given = (1, 1, 0, 24, 1e-6, *weights, 500000.0)
        wide = make.randn(3, 60, dtype=dtype)[:, 7:55]
        yield make.args(wide, *given, True, spot[:3], 4.0, 3.0, 3.0, 1.2, rotary_dim=10)
    weights = make.randn(8), make.randn(8)
    none = make.arange(0)
    yield make.args(make.randn(0, 32), 2, 1, 1, 8, 1e-6, *weights, 1e4, True, none, *plain)


@head_norm_rope.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        weight = make.randn(5, 16, dtype=dtype)
        yield make.args(make.randn(7, 5, 16, dtype=dtype), weight, make.randn(7, 16))
        wide = make.randn(3, 7, 16, dtype=dtype)
        yield make.args(wide[:, :5], weight, None, eps=1e-5)
        # Queries that are views between gates (strided), of which only part of each head is
        # rotated.
        yield make.args(make.randn(3, 10, 16, dtype=dtype)[:, ::2], weight, make.randn(3, 6))
        yield make.args(make.randn(0, 5, 16, dtype=dtype), weight, make.randn(0, 16))


@heads_into_cache.cases
def _(make: Make) -> Cases:
    location = make.tensor([17, 3, -1, 31, 8], torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        caches = [make.randn(4, 2, 8, 16, dtype=dtype) for _ in range(2)]
        wide = make.randn(5, (4 + 2 + 2) * 16 + 7, dtype=dtype)
        up, angles = make.randn(5, 4 * 16, dtype=dtype), make.randn(5, 16)
        low = (wide, up, make.randn(10, 16, dtype=dtype), angles)
        yield make.args(*low, *caches, location, 4)
        plain = (wide, None, make.randn(6, 16, dtype=dtype), None)
        yield make.args(*plain, *caches, location, 4, 1e-5)
        own = make.randn(5, (4 + 2 + 4 + 2) * 16, dtype=dtype)
        yield make.args(own, None, make.randn(10, 16, dtype=dtype), angles, *caches, location, 4)
        yield make.args(*low, *caches, location, 4, whole=True)
        yield make.args(*plain, *caches, location, 4, 1e-5, True)
        yield make.args(*low, *caches, location, 4, 1e-5, True, make.rand(5, 3))
        yield make.args(*plain, *caches, location, 4, 1e-5, True, make.rand(5, 2))
        one = [make.randn(3, 1, 4, 24, dtype=dtype) for _ in range(2)]
        weight = make.randn(6, 24, dtype=dtype)
        given = (make.randn(3, 200, dtype=dtype), None, weight, make.randn(3, 24))
        yield make.args(*given, *one, location[1:4] % 12, 5)
        yield make.args(*given, *one, location[1:4] % 12, 5, whole=True)
        for at in (1, 2):
            alone, turn = wide[at : at + 1], angles[at : at + 1]
            there = (*caches, location[at : at + 1], 4)
            yield make.args(alone, up[:1], low[2], turn, *there)
            yield make.args(alone, None, plain[2], None, *there, 1e-5)
            yield make.args(own[:1], None, low[2], turn, *there)
            yield make.args(own[:1], None, low[2], turn, *there, whole=True)
        # Head widths for which the CPU's vectorised loops run.
        caches = [make.randn(4, 2, 8, 32, dtype=dtype) for _ in range(2)]
        wide, turn = make.randn(5, 12 * 32, dtype=dtype), make.randn(5, 32)
        weight = make.randn(10, 32, dtype=dtype)
        yield make.args(wide, None, weight[:6], None, *caches, location, 4, 1e-5)
        yield make.args(wide, None, weight, turn, *caches, location, 4)
    many = SPREAD_TOKENS + 44
    caches = [make.randn(40, 2, 8, 16) for _ in range(2)]
    given = (make.randn(many, 20 * 16), None, make.randn(18, 16), make.randn(many, 16))
    places = make.rand(320).argsort()[:many]
    yield make.args(*given, *caches, places, 8)
    yield make.args(*given, *caches, places, 8, whole=True)
    empty = (make.randn(0, 128), None, make.randn(6, 16), make.randn(0, 16))
    yield make.args(*empty, *(make.randn(4, 2, 8, 16) for _ in range(2)), location[:0], 4)


@head_squares.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        wide = make.randn(5, 8 * 24 + 7, dtype=dtype)
        up = make.randn(5, 4 * 24, dtype=dtype)
        yield make.args(wide, up, 4, 2, 24)
        yield make.args(wide, None, 4, 2, 24)
        yield make.args(wide, None, 3, 1, 24, True, 2)
    yield make.args(make.randn(0, 128), None, 4, 2, 16)


@rotary_cos_sin.cases
def _(make: Make) -> Cases:
    yield make.args(make.randint(0, 1000, 9), make.rand(16))
    yield make.args(make.randint(0, 1 << 20, 5), make.rand(32) * 1e-3)
    yield make.args(make.arange(0), make.rand(4))


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


@split_norm_rope.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        angles = make.randn(5, 16)
        wide = make.randn(5, 4 * 16 + 2 * 16 + 2 * 16 + 7, dtype=dtype)
        up = make.randn(5, 4 * 16, dtype=dtype)
        yield make.args(wide, up, make.randn(10, 16, dtype=dtype), angles, 4, 2)
        yield make.args(wide, None, make.randn(6, 16, dtype=dtype), angles, 4, 2, 1e-5)
        own = make.randn(5, (4 + 2 + 4 + 2) * 16, dtype=dtype)
        yield make.args(own, None, make.randn(10, 16, dtype=dtype), None, 4, 2)
        weight = make.randn(10, 16, dtype=dtype)
        yield make.args(own, None, weight, angles, 4, 2, 1e-5, True, make.rand(5, 3))
        weight = make.randn(6, 24, dtype=dtype)
        yield make.args(make.randn(3, 200, dtype=dtype), None, weight, make.randn(3, 24), 5, 1)
        yield make.args(wide, up, make.randn(10, 16, dtype=dtype), angles, 4, 2, whole=True)
        own = make.randn(4, (5 + 3 + 5) * 24, dtype=dtype)
        weight = make.randn(13, 24, dtype=dtype)
        yield make.args(own, None, weight, None, 5, 3, 1e-5, True)
        yield make.args(own, None, weight[:8], make.randn(4, 24), 5, 3, 1e-5, True)
    many = BLOCK_TOKENS + 44
    given = (make.randn(many, 128), make.randn(many, 64), make.randn(10, 16), make.randn(many, 16))
    yield make.args(*given, 4, 2)
    yield make.args(make.randn(0, 96), None, make.randn(6, 16), make.randn(0, 16), 4, 2)
