"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.hyper.mhc_head import mhc_head
from cairn.ops.hyper.mhc_post import mhc_post
from cairn.ops.hyper.mhc_pre import mhc_pre

COUNT = 4
"""Streams of DeepSeek-V4-Flash."""
SIZES = {"full": (4096, (1, 64, 4096)), "tiny": (32, (1, 5))}
"""Hidden size, and token counts."""
F32 = torch.float32


@mhc_pre.bench
def _(draw: Draw) -> Points:
    rows = (2 + COUNT) * COUNT
    hidden, batches = SIZES[draw.sizes]
    for tokens in batches:
        streams = draw.randn(tokens, COUNT, hidden)
        fn = draw.randn(rows, COUNT * hidden, dtype=F32, scale=0.01)
        scale, base = draw.randn(3, dtype=F32), draw.randn(rows, dtype=F32)
        given = draw.args(streams, fn, scale, base, 1e-6, 1e-6, 20)
        size = f"{tokens} x {COUNT} x {hidden}"
        yield Point(size, given, moved(streams, streams[:, 0], fn), definition=True)


@mhc_post.bench
def _(draw: Draw) -> Points:
    hidden, batches = SIZES[draw.sizes]
    for tokens in batches:
        streams, delta = draw.randn(tokens, COUNT, hidden), draw.randn(tokens, hidden)
        post, mix = draw.rand(tokens, COUNT), draw.rand(tokens, COUNT, COUNT)
        given = draw.args(streams, delta, post, mix)
        size = f"{tokens} x {COUNT} x {hidden}"
        yield Point(size, given, moved(streams, streams, delta), definition=True)


@mhc_head.bench
def _(draw: Draw) -> Points:
    hidden, batches = SIZES[draw.sizes]
    for tokens in batches:
        streams = draw.randn(tokens, COUNT, hidden)
        fn = draw.randn(COUNT, COUNT * hidden, dtype=F32, scale=0.01)
        scale, base = draw.randn(1, dtype=F32), draw.randn(COUNT, dtype=F32)
        given = draw.args(streams, fn, scale, base, 1e-6, 1e-6)
        size = f"{tokens} x {COUNT} x {hidden}"
        yield Point(size, given, moved(streams, streams[:, 0], fn), definition=True)
