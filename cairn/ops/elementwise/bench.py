"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.elementwise.concat_mla import concat_mla_absorb_q, concat_mla_k
from cairn.ops.elementwise.copy_to_gpu_no_ce import put_integers
from cairn.ops.elementwise.fp8 import E4M3, downcast_fp8, fp8_quantize
from cairn.ops.elementwise.hadamard_blocks import ORDERS, hadamard_transform_blocks
from cairn.ops.elementwise.hadamard_transform import hadamard_transform
from cairn.ops.elementwise.mla_kv_pack import mla_kv_pack_quantize_fp8_into
from cairn.ops.elementwise.positions import (
    clamp_position,
    fixup_zero_kv_rows,
    resolve_future_token_ids,
)
from cairn.ops.elementwise.timestep_embedding import timestep_embedding
from cairn.ops.testing import Arguments

MAX_TIMED = 4096
"""Tokens, whose queries take 600 MB."""


HEADS, NOPE, ROPE, LATENT = 128, 128, 64, 512
"""DeepSeek-V3's: query heads, elements without and with rotary embedding, elements of the
latent."""


def _cat(k: Tensor, k_nope: Tensor, k_rope: Tensor) -> Tensor:
    return torch.cat((k_nope, k_rope.expand(-1, k.shape[1], -1)), dim=-1, out=k)


@concat_mla_k.bench
def _(draw: Draw) -> Points:
    for _, each in draw.rows():
        rows = min(each, MAX_TIMED)
        k = draw.randn(rows, HEADS, NOPE + ROPE)
        parts = draw.randn(rows, HEADS, NOPE), draw.randn(rows, 1, ROPE)
        others = (Alternative("cat", _cat),)
        size = f"{rows} x {HEADS} x ({NOPE} + {ROPE})"
        yield Point(
            size, draw.args(k, *parts), moved(k, *parts), alternatives=others, definition=True
        )


@concat_mla_absorb_q.bench
def _(draw: Draw) -> Points:
    for _, each in draw.rows():
        rows = min(each, MAX_TIMED)
        a, b = draw.randn(rows, HEADS, LATENT), draw.randn(rows, HEADS, ROPE)
        others = (Alternative("cat", lambda a, b: torch.cat((a, b), dim=-1)),)
        size = f"{rows} x {HEADS} x ({LATENT} + {ROPE})"
        yield Point(size, draw.args(a, b), moved(a, a, b, b), alternatives=others)


def _copy_of(given: Tensor, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """torch's copy, which is asynchronous from pinned memory."""
    pinned = given if device == "cpu" else given.pin_memory()
    return lambda output, _: output.copy_(pinned, non_blocking=True)


@put_integers.bench
def _(draw: Draw) -> Points:
    for count in (32, 72, 128):
        out = draw.randint(0, 1 << 20, count, dtype=torch.int32)
        given = out.cpu()
        copy = Alternative("copy from pinned memory", _copy_of(given, draw.device))
        yield Point(str(count), draw.args(out, given), moved(out, out), alternatives=(copy,))


@fp8_quantize.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x = draw.randn(rows, width)
        yield Point(size, draw.args(x, 0.5), moved(x) + x.numel(), definition=True)


@mla_kv_pack_quantize_fp8_into.bench
def _(draw: Draw) -> Points:
    """DeepSeek-V3's heads for the tokens of a prompt."""
    tiny = len(draw.layers) == 1
    for tokens, heads, nope, rope in ((5, 2, 16, 8),) if tiny else ((8192, 16, 128, 64),):
        k, pe = draw.randn(tokens, heads, nope), draw.randn(tokens, 1, rope)
        v = draw.randn(tokens, heads, nope)
        codes = draw.randint(0, 60, tokens, heads, nope + rope, dtype=torch.uint8)
        outs = codes.view(E4M3), codes[..., :nope].contiguous().view(E4M3)
        yield Point(
            f"{tokens} x {heads} x {nope + rope}",
            draw.args(k, pe, v, *outs, 0.5, 0.5),
            moved(k, pe, v) + 2 * k.numel() + tokens * heads * rope,
            definition=True,
        )


@downcast_fp8.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, dim = layer.kv_heads, layer.head_dim
        k, v = (draw.randn(rows, heads, dim) for _ in range(2))
        slots = rows + 64
        outs = [draw.randint(0, 255, slots, heads, dim, dtype=torch.uint8) for _ in range(2)]
        scale, spot = draw.full((1,), 0.5), draw.rand(slots).argsort()[:rows]
        yield Point(
            f"{layer.name}: {rows} x {heads} x {dim}",
            draw.args(k, v, *outs, scale, scale, spot),
            moved(k, v, spot) + 2 * k.numel(),
            definition=True,
        )


@hadamard_transform.bench
def _(draw: Draw) -> Points:
    sizes = [(rows, width) for _, rows, width in draw.matrices()]
    sizes += [(rows * layer.heads, layer.head_dim) for layer, rows in draw.rows()]
    for rows, width in sizes:
        x = draw.randn(rows, width)
        matrix = hadamard_transform.reference(torch.eye(width, device=x.device), width**-0.5)
        given = Arguments((x, matrix.to(x.dtype)))
        yield Point(
            f"{rows} x {width}",
            draw.args(x, width**-0.5),
            moved(x, x),
            alternatives=(Alternative("matmul", torch.matmul, given),),
        )


@clamp_position.bench
def _(draw: Draw) -> Points:
    for _, count in draw.rows():
        lengths = draw.randint(0, 1 << 17, count)
        others = (Alternative("clamp", lambda lengths: (lengths - 1).clamp_(min=0)),)
        yield Point(str(count), draw.args(lengths), moved(lengths, lengths), alternatives=others)


@resolve_future_token_ids.bench
def _(draw: Draw) -> Points:
    for _, count in draw.rows():
        ids, future = draw.randint(-count, count, count), draw.randint(0, 50000, count + 1)
        others = (Alternative("where", resolve_future_token_ids.reference),)
        least = moved(ids, ids, future)
        yield Point(str(count), draw.args(ids, future), least, alternatives=others, definition=True)


@fixup_zero_kv_rows.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, dim, count = layer.heads, layer.head_dim, min(rows, 8)
        length = rows // count
        out, lse = draw.randn(rows, heads, dim), draw.randn(rows, heads, dtype=torch.float32)
        lens = (draw.arange(count) % 2).int()
        begin = (draw.arange(count + 1) * length).int()
        written = moved(out, lse) * int((lens == 0).sum()) // count
        yield Point(
            f"{layer.name}: {rows} x {heads} x {dim}, half of {count}",
            draw.args(out, lse, lens, begin, length),
            written,
            definition=True,
        )


@hadamard_transform_blocks.bench
def _(draw: Draw) -> Points:
    size = 256 if draw.sizes == "full" else 4
    for order in ORDERS:
        x = draw.randn(64, order * size)
        yield Point(f"64 x {order * size}", draw.args(x, order), moved(x, x))


@timestep_embedding.bench
def _(draw: Draw) -> Points:
    t = draw.rand(64)
    yield Point("64 x 320", draw.args(t, 320), moved(t) + 4 * 64 * 320, definition=True)
