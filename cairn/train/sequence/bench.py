"""Benchmark points of this family."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.train.sequence.sequence_attention import sequence_attention


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full causal attention by SDPA, [B, h, L, d], for comparison."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


@sequence_attention.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        size, dim = layer.page_size, layer.head_dim
        pages = min(rows, 8192 // size)
        length = pages * size
        q, z = (draw.randn(1, length, layer.heads, dim) for _ in range(2))
        k, v = (draw.randn(1, length, layer.kv_heads, dim) for _ in range(2))
        key = draw.randn(1, pages, layer.heads, dim)
        bias = draw.randn(1, pages, layer.heads, dtype=torch.float32)
        read = min(length, layer.window + layer.topk * size)
        plain = draw.args(*(x.transpose(1, 2) for x in (q, k, v)))
        yield Point(
            f"{layer.name}: {length} slots",
            draw.args(q, k, v, z, key, bias, size, layer.window, layer.topk, True),
            moved(q, q, z, k, v, key),
            4.0 * q.numel() * read,
            (Alternative("sdpa", _dense, plain),),
        )
