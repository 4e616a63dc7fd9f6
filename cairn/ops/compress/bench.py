"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.compress.compress_windows import compress_windows
from cairn.ops.compress.norm_rope_tail import norm_rope_tail

PAGE = 64
SIZES = {"full": (512, 64, 64, (1, 64, 4096)), "tiny": (32, 8, 2, (1, 5, 128))}
"""Head dim, rotary dim and heads of DeepSeek-V4-Flash, and token counts."""
F32 = torch.float32


@norm_rope_tail.bench
def _(draw: Draw) -> Points:
    dim, rope, heads, batches = SIZES[draw.sizes]
    for tokens in batches:
        x, angles = draw.randn(tokens, heads, dim), draw.randn(tokens, rope, dtype=F32)
        size = f"{tokens} x {heads} x {dim}"
        yield Point(size, draw.args(x, angles, eps=1e-6), moved(x, x), definition=True)


@compress_windows.bench
def _(draw: Draw) -> Points:
    dim, rope, _, (_, few, many) = SIZES[draw.sizes]
    for rate, parts in ((4, 2), (128, 1)):
        wide = parts * dim
        for rows, tokens in ((few, few), (1, many)):
            pages = max(4, many // PAGE)
            inputs = draw.randn(pages, PAGE, 2 * wide, dtype=F32)
            table = draw.randint(0, pages, rows, pages, dtype=torch.int32)
            slot = torch.arange(tokens) if rows == 1 else torch.full((tokens,), 2 * rate - 1)
            row = torch.arange(tokens) % rows
            read = tokens // (1 if rows > 1 else rate) * parts * rate * 2 * dim * 4
            given = draw.args(
                inputs,
                table,
                row.to(draw.device),
                slot.to(draw.device),
                draw.randn(rate, wide, dtype=F32),
                draw.randn(dim),
                1e-6,
                draw.randn(tokens, rope, dtype=F32),
                torch.bfloat16,
            )
            yield Point(f"{tokens} of {rows} rows, {parts} x {rate}", given, read, definition=True)
