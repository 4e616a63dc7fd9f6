"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.checks import FLOATS, INDICES
from cairn.ops.elementwise.concat_mla import concat_mla_absorb_q, concat_mla_k
from cairn.ops.elementwise.copy_to_gpu_no_ce import put_integers
from cairn.ops.elementwise.fp8 import E4M3, KINDS, downcast_fp8, fp8_quantize
from cairn.ops.elementwise.hadamard_blocks import ORDERS, hadamard_transform_blocks
from cairn.ops.elementwise.hadamard_transform import hadamard_transform
from cairn.ops.elementwise.mla_kv_pack import mla_kv_pack_quantize_fp8_into
from cairn.ops.elementwise.positions import (
    clamp_position,
    fixup_zero_kv_rows,
    resolve_future_token_ids,
)
from cairn.ops.elementwise.timestep_embedding import timestep_embedding
from cairn.ops.testing import Cases, Make


@concat_mla_k.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        nope, rope = make.randn(5, 3, 16, dtype=dtype), make.randn(5, 1, 8, dtype=dtype)
        yield make.args(make.empty(5, 3, 24, dtype=dtype), nope, rope)
        joint = make.randn(7, 9, 40, dtype=dtype)
        latent = make.randn(7, 13, dtype=dtype)
        k = make.empty(7, 9, 32, dtype=dtype)[..., :28]
        yield make.args(k, joint[..., :23], latent[:, None, 8:])
    for kind in KINDS:
        nope, rope = make.randn(5, 3, 16).to(kind), make.randn(5, 1, 8).to(kind)
        yield make.args(make.empty(5, 3, 24, dtype=kind), nope, rope)
    yield make.args(make.empty(0, 3, 12), make.randn(0, 3, 8), make.randn(0, 1, 4))


@concat_mla_absorb_q.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(5, 3, 16, dtype=dtype), make.randn(5, 3, 8, dtype=dtype))
        a, b = make.randn(7, 40, dtype=dtype)[:, :33], make.randn(7, 5, dtype=dtype)
        yield make.args(a, b, out=make.empty(7, 38, dtype=dtype))
        joint = make.randn(2, 3, 4, 9, dtype=dtype)
        yield make.args(joint[..., :2], joint[..., 2:])
    yield make.args(make.randn(0, 3, 8), make.randn(0, 3, 4))


@put_integers.cases
def _(make: Make) -> Cases:
    for count in (0, 1, 31, 64, 72, 128, 129, 1000):
        given = make.randint(-(1 << 31), 1 << 31, count, dtype=torch.int32).cpu()
        given[: count // 2] %= 17
        yield make.args(make.empty(count, dtype=torch.int32), given)
    yield make.args(make.empty(6, dtype=torch.int32)[::2], given[:3])


@fp8_quantize.cases
def _(make: Make) -> Cases:
    inf = float("inf")
    edges = [0.0, -0.0, 448.0, 464.0, 1e9, -inf, 2.0**-9, 2.0**-10, 2.9e-3, 57344.0, 61440.0, 1e-7]
    for kind in KINDS:
        for dtype in FLOATS:
            yield make.args(make.randn(7, 33, dtype=dtype, scale=50.0), 0.7, fp8_dtype=kind)
        yield make.args(make.tensor(edges), fp8_dtype=kind)
        wide = make.randn(5, 3000, dtype=torch.bfloat16)[:, 5:2900]
        yield make.args(wide, 100.0, out=make.empty(5, 2895, dtype=kind), fp8_dtype=kind)
        yield make.args(make.randn(3, 4, 6)[:, ::2], fp8_dtype=kind)
        yield make.args(make.randn(0, 4), fp8_dtype=kind)


@mla_kv_pack_quantize_fp8_into.cases
def _(make: Make) -> Cases:
    for kind in KINDS:
        outs = [make.empty(5, 3, width, dtype=kind) for width in (32, 20)]
        for dtype in FLOATS:
            k, pe = make.randn(5, 3, 24, dtype=dtype, scale=50.0), make.randn(5, 1, 8, dtype=dtype)
            v = make.randn(5, 3, 20, dtype=dtype, scale=90.0)
            yield make.args(k, pe, v, *outs, 0.7, 90.0)
        both = make.randn(7, 4, 50, dtype=torch.bfloat16)
        shared = make.randn(7, 1, 40, dtype=torch.bfloat16)[..., 3:13]
        outs = [make.empty(7, 4, width, dtype=kind) for width in (40, 20)]
        yield make.args(both[..., :30], shared, both[..., 30:], *outs, 2.0, 500.0)
        none = [part[:0] for part in (both[..., :30], shared, both[..., 30:], *outs)]
        yield make.args(*none)


@downcast_fp8.cases
def _(make: Make) -> Cases:
    spot = make.tensor([4, 0, 9, -1, 7], torch.int64)
    scale, other = make.tensor([0.3]), make.tensor([7.0])
    for dtype in FLOATS:
        k, v = (make.randn(5, 2, 24, dtype=dtype, scale=100.0) for _ in range(2))
        outs = [make.randint(0, 255, 20, 2, 24, dtype=torch.uint8) for _ in range(2)]
        yield make.args(k, v, *outs, scale, other, spot)
        wide = make.randn(5, 6, 7, dtype=dtype)
        outs = [make.randn(20, 3, 7).to(E4M3) for _ in range(2)]
        yield make.args(wide[:, :3], wide[:, 3:], *outs, None, scale, spot.int(), 2, 1)
    outs = [make.randint(0, 255, 20, 2, 8, dtype=torch.uint8) for _ in range(2)]
    yield make.args(make.randn(0, 2, 8), make.randn(0, 2, 8), *outs, None, None, spot[:0])


@hadamard_transform.cases
def _(make: Make) -> Cases:
    for dtype in FLOATS:
        for width in (1, 7, 64, 100):
            yield make.args(make.randn(5, width, dtype=dtype), width**-0.5)
        yield make.args(make.randn(2, 3, 256, dtype=dtype), scale=1 / 16)
        yield make.args(make.randn(2, 1100, dtype=dtype)[:, :1000], 1 / 32)
    yield make.args(make.randn(3, 8), 1.0)
    yield make.args(make.randn(2, 8192), 2.0**-6.5)
    yield make.args(make.randn(0, 8))


@clamp_position.cases
def _(make: Make) -> Cases:
    for dtype in INDICES:
        yield make.args(make.tensor([0, 1, 7, -3, 1 << 30, 0, 2], dtype))
        yield make.args(make.randint(0, 1 << 20, 1000, dtype=dtype))
        yield make.args(make.arange(0, dtype))
    yield make.args(make.randint(0, 99, 5, 4)[:, 1])


@resolve_future_token_ids.cases
def _(make: Make) -> Cases:
    for dtype in INDICES:
        future = make.randint(0, 50000, 20, dtype=dtype)
        yield make.args(make.tensor([5, -1, 0, -19, 700, -7, -1], dtype), future)
        yield make.args(make.randint(-19, 1000, 1000, dtype=dtype), future)
        yield make.args(make.arange(0, dtype), future)
    yield make.args(make.randint(-4, 9, 6, 2)[:, 0], make.randint(0, 9, 5))


@fixup_zero_kv_rows.cases
def _(make: Make) -> Cases:
    for dtype in FLOATS:
        out = make.randn(9, 3, 24, dtype=dtype)
        out[2] = float("nan")
        lens = make.tensor([4, 0, 0, 7, 0], torch.int32)
        begin = make.tensor([0, 2, 3, 3, 6, 8], torch.int32)
        yield make.args(out, make.randn(9, 3), lens, begin, 3)
    wide = make.randn(5, 1200)[:, :1100].unflatten(1, (11, 100))
    lens, begin = make.tensor([0, 1], torch.int64), make.tensor([0, 3, 5], torch.int64)
    yield make.args(wide, make.randn(11, 5).T, lens, begin, 3)
    yield make.args(wide, make.randn(5, 11), lens, begin, 3)
    yield make.args(make.randn(0, 2, 4), make.randn(0, 2), lens[:0], begin[:1] * 0, 0)


@hadamard_transform_blocks.cases
def _(make: Make) -> Cases:
    for order in ORDERS:
        yield make.args(make.randn(3, 4 * order), order, 0.25)
        yield make.args(make.randn(2, 3, 100, dtype=torch.bfloat16), order, 0.1)
    yield make.args(make.randn(3, 8)[:, :5], 12)
    yield make.args(make.randn(0, 8), 20)


@timestep_embedding.cases
def _(make: Make) -> Cases:
    yield make.args(make.rand(5), 32)
    yield make.args(make.randint(0, 1000, 7), 33, True, 1.0, 0.5, 100, torch.bfloat16)
    yield make.args(make.rand(3, dtype=torch.bfloat16), 2, downscale_freq_shift=0.5)
    yield make.args(make.rand(0), 8)
