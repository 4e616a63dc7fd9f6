"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.grammar.apply_token_bitmask_inplace_cuda import BITS, mask_tokens


@mask_tokens.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32)
        words = draw.randint(-(1 << 31), 1 << 31, rows, -(-vocabulary // BITS), dtype=torch.int32)
        yield Point(
            f"{rows} x {vocabulary}",
            draw.args(logits, words),
            moved(logits, logits, words),
            definition=True,
        )
