"""What `cairn bench ops` times of this family."""

from __future__ import annotations

import torch

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.hyper.mhc_head import mhc_head
from cairn.ops.hyper.mhc_post import mhc_post
from cairn.ops.hyper.mhc_pre import mhc_pre

COUNT, HIDDEN = 4, 4096
"""Streams and width of DeepSeek-V4-Flash."""
TOKENS = (1, 64, 4096)
F32 = torch.float32


@mhc_pre.bench
def _(draw: Draw) -> Points:
    rows = (2 + COUNT) * COUNT
    for tokens in TOKENS:
        streams = draw.randn(tokens, COUNT, HIDDEN)
        fn = draw.randn(rows, COUNT * HIDDEN, dtype=F32, scale=0.01)
        scale, base = draw.randn(3, dtype=F32), draw.randn(rows, dtype=F32)
        given = draw.args(streams, fn, scale, base, 1e-6, 1e-6, 20)
        size = f"{tokens} x {COUNT} x {HIDDEN}"
        yield Point(size, given, moved(streams, streams[:, 0], fn), definition=True)


@mhc_post.bench
def _(draw: Draw) -> Points:
    for tokens in TOKENS:
        streams, delta = draw.randn(tokens, COUNT, HIDDEN), draw.randn(tokens, HIDDEN)
        post, mix = draw.rand(tokens, COUNT), draw.rand(tokens, COUNT, COUNT)
        given = draw.args(streams, delta, post, mix)
        size = f"{tokens} x {COUNT} x {HIDDEN}"
        yield Point(size, given, moved(streams, streams, delta), definition=True)


@mhc_head.bench
def _(draw: Draw) -> Points:
    for tokens in TOKENS:
        streams = draw.randn(tokens, COUNT, HIDDEN)
        fn = draw.randn(COUNT, COUNT * HIDDEN, dtype=F32, scale=0.01)
        scale, base = draw.randn(1, dtype=F32), draw.randn(COUNT, dtype=F32)
        given = draw.args(streams, fn, scale, base, 1e-6, 1e-6)
        size = f"{tokens} x {COUNT} x {HIDDEN}"
        yield Point(size, given, moved(streams, streams[:, 0], fn), definition=True)
