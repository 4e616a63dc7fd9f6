"""A few tokens a row on the CPU: each gathers the keys that it sees, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.attention import tiles as tiling
from cairn.ops.scratch import scratch

FEW_TOKENS = 32
"""Steps of fewer tokens have too little in common for tiles."""
_PER_ROW = 2
"""Tokens a row at most, on the average, of larger steps: each with the landmark behind it."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lines:
    """Where tokens' keys lie in a cache [pages, h_kv, S, d] seen as lines [pages * h_kv * S, d].

    Attributes:
        places: [T, h_kv, n] int64, n as the token with most keys has.
        mask: [T, 1, 1, n] float32, -inf where a place stands for no key (it is then that of another
            key of the token, if there is one), 0 elsewhere; None: all are keys.
        blind: [T] bool, tokens without a key; None: there is none.
    """

    places: Tensor
    mask: Tensor | None
    blind: Tensor | None


def few(row: Tensor) -> bool:
    """Whether a step [T], whose rows lie side by side, has few tokens, or few a row; T > 0."""
    tokens = row.numel()
    if tokens < FEW_TOKENS:
        return tokens > 0
    rows = row.numpy()
    return bool(_PER_ROW * (1 + np.count_nonzero(rows[1:] != rows[:-1])) >= tokens)


def find(
    heads: int,
    size: int,
    page_table: NDArray[np.int32],
    row: Ints,
    first: Ints,
    last: Ints,
    mask_landmarks: bool,
) -> Lines:
    """The lines of slots first .. last of every token's row.

    Args:
        heads, size: h_kv, S.
        page_table: [rows, max_pages], physical pages.
        row, first, last: [T], first >= 0.
        mask_landmarks: leave the last slot of every page out; S > 1.
    """
    seen = size - mask_landmarks
    # Keys are counted from the start of the row, those left out not.
    begin, end = (
        (page * seen + np.minimum(offset, seen))[:, None]
        for page, offset in (np.divmod(first, size), np.divmod(last + 1, size))
    )
    count = end - begin
    key = begin + np.arange(max(0, int(count.max())))
    page, offset = np.divmod(np.maximum(np.minimum(key, end - 1), 0), seen)
    line = page_table[row[:, None], page].astype(np.int64) * (heads * size) + offset
    places = line[:, None] + np.arange(0, heads * size, size)[:, None]
    mask = blind = None
    if (count != key.shape[1]).any():
        mask = tiling.additive(torch.from_numpy(key >= end), torch.float32)[:, None, None]
        if (count <= 0).any():
            blind = torch.from_numpy(count[:, 0] <= 0)
    return Lines(torch.from_numpy(places), mask, blind)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lines: Lines, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of tokens q [T, h_q, d] over their lines of the caches (contiguous, q's dtype).

    Returns:
        (o [T, h_q, d] in q's dtype, lse [T, h_q] float32); of a blind token 0 and -inf.
    """
    tokens, heads, keys = lines.places.shape
    if keys == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    step = paging.tokens_per_block(heads * keys * q.shape[2] * q.element_size(), tokens)
    if step == tokens:
        o, lse = _attend(q, k_cache, v_cache, lines.places, lines.mask, scale)
    else:
        masks = repeat(None) if lines.mask is None else lines.mask.split(step)
        blocks = zip(q.split(step), lines.places.split(step), masks, strict=False)
        parts = [_attend(x, k_cache, v_cache, at, mask, scale) for x, at, mask in blocks]
        o, lse = map(torch.cat, zip(*parts, strict=True))
    if lines.blind is not None:
        o[lines.blind], lse[lines.blind] = 0, -torch.inf
    return o, lse


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    places: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """`attend` at once; of the blind tokens anything."""
    index, shape = places.view(-1), (*places.shape, q.shape[2])
    k, v = (scratch(name, (len(index), shape[-1]), q.dtype) for name in ("keys", "values"))
    torch.index_select(k_cache.view(-1, shape[-1]), 0, index, out=k)
    torch.index_select(v_cache.view(-1, shape[-1]), 0, index, out=v)
    o, lse = tiling.flash(
        q.reshape(*shape[:2], -1, shape[-1]), k.view(shape), v.view(shape), mask, scale
    )
    return o.reshape(q.shape), lse.reshape(q.shape[:2])
