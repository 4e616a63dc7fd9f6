"""Scores of the lightning indexer over contiguous keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cairn.ops import gpu
from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, INDICES, check_min, expect, expect_within
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op
from cairn.ops.sparse_mla import score_launch
from cairn.ops.sparse_mla.index_scores import (
    REASON,
    TOLERANCES,
    bytes_of_query,
    check_queries,
    score_keys,
    unscored,
)

BLOCK = 64
"""Keys per block of the definition."""


@op(mutates=("logits",))
def ragged_mqa_logits_into(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    scale: Tensor | None,
    start: Tensor,
    end: Tensor,
    logits: Tensor,
    compact: bool = False,
) -> None:
    """`ragged_mqa_logits` into an existing tensor; columns of keys outside of a token's range are
    not changed.

    Args:
        q, weights, k, scale, start, end: as in `ragged_mqa_logits`.
        logits: [T, L] or, with compact, [T, width] float32, rows of any stride; changed.
        compact: column j is key start + j.
    Raises:
        BadArgument: as in `ragged_mqa_logits`.
    """
    tokens, heads, dim = q.shape
    length, columns = len(k), logits.shape[1]
    if not length or not columns:
        return
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
        if compact:
            key = key + low
            scores = scores.gather(1, key.clamp(0, length - 1).long())
        seen = (key >= low.clamp(min=0)) & (key < high.clamp(max=length))
        logits[part] = torch.where(seen, scores, logits[part])


@ragged_mqa_logits_into.front
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
        q: [T, Hi, D] float32, bfloat16, float16 or float8_e4m3fn; the scales of a float8 query are
            multiplied into its weights.
        weights: [T, Hi] float32, of any sign.
        k: [L, D], any of these dtypes: the concatenated keys of all requests.
        scale: [L] float32; None: 1.
        start, end: [T] int32 or int64; a token with end <= start sees no key.
        width: None: column j of the result is key j. Else the result is compact: column j is key
            start + j, and `width` is the upper bound of end - start.
    Returns:
        [T, L] or [T, width] float32. Columns of keys outside of start .. end - 1 are not written.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) an end beyond the keys.
    """
    if width is not None:
        check_min("ragged_mqa_logits", "width", width, 0)
    logits = unscored(len(q), len(k) if width is None else width, q.device)
    ragged_mqa_logits_into(q, weights, k, scale, start, end, logits, width is not None)
    return logits


@ragged_mqa_logits_into.check
def _(call: Call) -> None:
    name = "ragged_mqa_logits_into"
    tokens, _, dim = check_queries(name, call.q, call.weights)
    expect(name, "k", call.k, (None, dim), (*FLOATS, E4M3), call.q)
    if call.scale is not None:
        expect(name, "scale", call.scale, call.k.shape[:1], FLOAT32, call.q)
    expect(name, "start", call.start, (tokens,), INDICES, call.q)
    expect(name, "end", call.end, (tokens,), INDICES, call.q)
    expect_within(name, "end", call.end, len(call.k) + 1, begin=None)
    columns = None if call.compact else len(call.k)
    expect(name, "logits", call.logits, (tokens, columns), FLOAT32, call.q, 1)
    if call.compact:
        seen = (call.end - call.start).clamp(min=0)
        expect_within(name, "width", seen, call.logits.shape[1] + 1)


def _fits(call: Call) -> bool:
    numbers = (call.start, call.end, *(() if call.scale is None else (call.scale,)))
    near = call.k.is_contiguous() and all(x.is_contiguous() for x in numbers)
    return near and score_launch.accepts(call.q, call.weights, call.logits)


@ragged_mqa_logits_into.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> None:
    keys = score_launch.Keys(call.k, call.scale, call.k.stride(0), 1)
    seen = score_launch.KeyRange(call.start, call.end, len(call.k), compact=call.compact)
    score_launch.score(call.q, call.weights, keys, seen, call.logits, chunked=True)


ragged_mqa_logits_into.tolerance(TOLERANCES, REASON)
