"""Scores of the lightning indexer over keys side by side."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cairn.ops.attention import paging
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOAT32, FLOATS, INDICES, check_least, expect, expect_within
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache
from cairn.ops.sparse_mla.index_scores import bytes_of_query, check_queries, score_keys
from cairn.ops.sparse_mla.samples import is_tiny, sizes_of
from cairn.ops.testing import Cases, Make

BLOCK = 64
"""Keys that are multiplied at once."""


@op
def ragged_mqa_logits(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    scale: Tensor | None,
    start: Tensor,
    end: Tensor,
    width: int | None = None,
) -> Tensor:
    """Score of keys start .. end - 1: scale_s * sum_h weights_h * max(0, q_h . k_s), in float32.

    Args:
        q: [T, Hi, D] float32, bfloat16, float16 or float8_e4m3fn; what scales a float8 query is in
            its weights.
        weights: [T, Hi] float32, of any sign.
        k: [L, D], any of these dtypes: the keys of all requests, one behind the other.
        scale: [L] float32; None: 1.
        start, end: [T] int32 or int64; end <= start is a token that sees no key.
        width: None: column j of the result is key j. Else the result is compact: column j is key
            start + j, and no token may see more keys than that.
    Returns:
        [T, L] or [T, width] float32. Columns of other keys are undefined (-inf in the definition).
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) an end behind the keys.
    """
    tokens, heads, dim = q.shape
    length = len(k)
    columns = length if width is None else width
    logits = torch.full((tokens, columns), -torch.inf, dtype=torch.float32, device=q.device)
    if not length:
        return logits
    spare = -length % BLOCK
    blocks = pad(k.float(), (0, 0, 0, spare)).view(1, -1, BLOCK, dim)
    scales = None if scale is None else pad(scale, (0, spare)).view(1, -1, BLOCK)
    column = torch.arange(columns, device=q.device)
    at_once = paging.tokens_per_block(bytes_of_query(heads, *blocks.shape[1:]), tokens)
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        query, low, high = q[part], start[part].unsqueeze(1), end[part].unsqueeze(1)
        scores = score_keys(query, weights[part], blocks, scales)[:, :length]
        key = column.expand(len(query), -1)
        if width is not None:
            key = key + low
            scores = scores.gather(1, key.clamp(0, length - 1).long())
        seen = (key >= low.clamp(min=0)) & (key < high.clamp(max=length))
        logits[part] = scores.masked_fill_(~seen, -torch.inf)
    return logits


@ragged_mqa_logits.check
def _(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    scale: Tensor | None,
    start: Tensor,
    end: Tensor,
    width: int | None = None,
) -> None:
    name = "ragged_mqa_logits"
    tokens, _, dim = check_queries(name, q, weights)
    expect(name, "k", k, (None, dim), (*FLOATS, E4M3), q)
    if scale is not None:
        expect(name, "scale", scale, k.shape[:1], FLOAT32, q)
    expect(name, "start", start, (tokens,), INDICES, q)
    expect(name, "end", end, (tokens,), INDICES, q)
    expect_within(name, "end", end, len(k) + 1, begin=None)
    if width is not None:
        check_least(name, "width", width, 0)
        expect_within(name, "width", (end - start).clamp(min=0), width + 1)


@ragged_mqa_logits.cases
def _(make: Make) -> Cases:
    for dtype, heads, dim in ((torch.float32, 3, 24), (torch.bfloat16, 4, 32)):
        q, k = make.randn(9, heads, dim, dtype=dtype), make.randn(50, dim, dtype=dtype)
        weights, scale = make.randn(9, heads), make.rand(50)
        start = make.tensor([0, 0, 0, 7, 7, 49, 50, 9, 3], torch.int32)
        end = make.tensor([1, 2, 50, 8, 30, 50, 50, 0, -1], torch.int32)
        yield make.args(q, weights, k, scale, start, end)
        yield make.args(q, weights, k, None, start.long(), end.long(), width=50)
        yield make.args(q[:0], weights[:0], k, scale, start[:0], end[:0])
        yield make.args(q[8:], weights[8:], k[:0], scale[:0], start[8:], end[8:], width=3)
        numbers, scales = index_cache.quantize(k, scale_ue8m0=False)
        own = index_cache.quantize(q, scale_ue8m0=False)[0]
        yield make.args(own, weights, numbers, scales, start, end)


@ragged_mqa_logits.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    heads, dim = sizes.index_heads, sizes.index_dim
    for tokens, length in ((5, 64),) if is_tiny(draw) else ((2048, 8192), (2048, 32768)):
        q, k = draw.randn(tokens, heads, dim), draw.randn(length, dim)
        numbers = index_cache.quantize(q, scale_ue8m0=False)[0]
        keys, scale = index_cache.quantize(k, scale_ue8m0=False)
        weights = draw.randn(tokens, heads, dtype=torch.float32)
        end = draw.arange(tokens, torch.int32) + (length - tokens + 1)
        pairs = tokens * (length - (tokens - 1) / 2)
        yield Point(
            f"{tokens} x {length}",
            draw.args(numbers, weights, keys, scale, torch.zeros_like(end), end),
            moved(numbers, weights, keys, scale) + int(4 * pairs),
            2.0 * pairs * heads * dim,
        )
