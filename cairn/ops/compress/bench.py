"""What `cairn bench ops` times of this family."""

from __future__ import annotations

import torch

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.compress.compress_windows import compress_windows
from cairn.ops.compress.norm_rope_tail import norm_rope_tail

DIM, ROPE, HEADS, PAGE = 512, 64, 64, 64
"""Of DeepSeek-V4-Flash."""
F32 = torch.float32


@norm_rope_tail.bench
def _(draw: Draw) -> Points:
    for tokens in (1, 64, 4096):
        x, angles = draw.randn(tokens, HEADS, DIM), draw.randn(tokens, ROPE, dtype=F32)
        size = f"{tokens} x {HEADS} x {DIM}"
        yield Point(size, draw.args(x, angles, eps=1e-6), moved(x, x), definition=True)


@compress_windows.bench
def _(draw: Draw) -> Points:
    for rate, parts in ((4, 2), (128, 1)):
        wide = parts * DIM
        for rows, tokens in ((64, 64), (1, 4096)):
            pages = max(2, 4096 // PAGE)
            inputs = draw.randn(pages, PAGE, 2 * wide, dtype=F32)
            table = draw.randint(0, pages, rows, pages, dtype=torch.int32)
            slot = torch.arange(tokens) if rows == 1 else torch.full((tokens,), 2 * rate - 1)
            row = torch.arange(tokens) % rows
            read = tokens // (1 if rows > 1 else rate) * parts * rate * 2 * DIM * 4
            given = draw.args(
                *(inputs, table, row.to(draw.device), slot.to(draw.device)),
                draw.randn(rate, wide, dtype=F32),
                *(draw.randn(DIM), 1e-6, draw.randn(tokens, ROPE, dtype=F32), torch.bfloat16),
            )
            yield Point(f"{tokens} of {rows} rows, {parts} x {rate}", given, read, definition=True)
