"""The kernel of the lightning indexer's scores, over paged or contiguous keys.

Keys are the rows of the matrix product and heads its columns: the sum over heads then stays within
a warp. A float8 key is multiplied with a float8 query directly; otherwise it is converted to the
query's dtype, which is exact.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def key_offsets(slot, column, DIM: tl.constexpr, PRESHUFFLED: tl.constexpr):
    """Offset in a page of element `column` [1, DP] of the key in `slot` [KEYS]."""
    token = slot[:, None]
    if PRESHUFFLED:
        tile = token // 16 * (16 * DIM) + column // 16 * 256
        return tile + token % 16 * 16 + column % 16
    return token * DIM + column


@triton.jit
def score_keys(
    query, weight, begin, end, low, high, mine, keys, scales, table, out, out_token,
    width, pages, page_stride, scale_stride,
    DIM: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    ONE_PAGE: tl.constexpr, TOKENS: tl.constexpr, PRESHUFFLED: tl.constexpr,
    COMPACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the scores of keys low .. high - 1 for the tokens in the mask `mine`; each token only
    for keys visible to it.

    Args:
        query: [DP, TOKENS * heads]; weight: [TOKENS * heads].
        begin, end: [TOKENS], the range of keys visible to each token. out_token: address of its
            scores, `width` of them.
        SIZE: page size; 0: keys are contiguous. ONE_PAGE: no tile of KEYS keys crosses a page
            border.
    """
    column = tl.arange(0, DP)[None, :]
    coming = low
    if ONE_PAGE:
        # Page ids are loaded one tile ahead, so that the loads of keys do not wait for them.
        coming = tl.load(table + low // SIZE, mask=low < high, other=-1)
    for start in range(low, high, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < high
        if SIZE:
            if ONE_PAGE:
                page = coming + 0 * position
                coming = tl.load(table + (start + KEYS) // SIZE, mask=start + KEYS < high, other=-1)
            else:
                page = tl.load(table + position // SIZE, mask=inside, other=-1)
            inside = inside & (page >= 0) & (page < pages)
            page = tl.where(inside, page, 0).to(tl.int64)
            slot = position % SIZE
            at = page[:, None] * page_stride + key_offsets(slot, column, DIM, PRESHUFFLED)
            scale_at = page * scale_stride + slot
        else:
            at = position.to(tl.int64)[:, None] * page_stride + column
            scale_at = position.to(tl.int64)
        shown = inside[:, None]
        if DP != DIM:
            shown = shown & (column < DIM)
        key = tl.load(keys + at, mask=shown, other=0.0)
        if key.dtype != query.dtype:
            key = key.to(tl.float32).to(query.dtype)
        dots = tl.dot(key, query, input_precision=PRECISION)
        # NaN of a query or of a key stays NaN.
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        if TOKENS == 1:
            score = tl.sum(dots, 1)[:, None]
        else:
            score = tl.sum(tl.reshape(dots, (KEYS, TOKENS, weight.shape[0] // TOKENS)), 2)
        if scales is not None:
            score = score * tl.load(scales + scale_at, mask=inside, other=0.0)[:, None]
        score = tl.where(inside[:, None], score, float("-inf"))
        place = position[:, None]
        seen = mine[None, :] & (place >= begin[None, :]) & (place < end[None, :])
        if COMPACT:
            place = place - begin[None, :]
        seen = seen & (place < width)
        tl.store(out + out_token[None, :] + place, score, mask=seen)


@triton.jit(do_not_specialize=["tokens", "limit", "width", "pages", "least"])
def scores_kernel(
    q, weights, keys, scales, table, rows, begins, ends, out,
    tokens, limit, width, pages, least, q_token, page_stride, scale_stride, table_stride,
    out_stride,
    HEADS: tl.constexpr, HP: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, PRESHUFFLED: tl.constexpr,
    COMPACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[t, j] = scale_j * sum_h weights[t, h] * max(0, q[t, h] . key_j) for the keys begins[t] ..
    ends[t] - 1; nothing else is written.

    A program handles TOKENS adjacent tokens and one split of the keys visible to them. Keys are
    read once for all of these tokens that share a row of the page table.

    Args:
        begins: None: 0 for all tokens.
        scales: None: all are 1.
        limit: upper bound of `ends`; width: columns of out.
        least: tokens with at most this many visible keys get no scores.
        page_stride: elements from page to page or, with SIZE = 0, from key to key.
        SIZE: page size; 0: contiguous keys, no page table.
    """
    one_page: tl.constexpr = (SIZE > 0 and SIZE % KEYS == 0) and begins is None
    # Later tokens see more keys, so their programs start first.
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    splits = tl.num_programs(1)
    t = tl.arange(0, TOKENS)
    token = group * TOKENS + t
    alive = token < tokens
    end = tl.load(ends + token, mask=alive, other=0).to(tl.int32)
    begin = tl.zeros([TOKENS], tl.int32)
    if begins is not None:
        begin = tl.load(begins + token, mask=alive, other=0).to(tl.int32)
    pending = alive & (end > begin) & (end > begin + least)
    if tl.max(pending.to(tl.int32), 0) == 0:
        return
    line = tl.arange(0, TOKENS * HP)
    line_token = (group * TOKENS + line // HP).to(tl.int64)
    head = line % HP
    shown = (line_token < tokens) & (head < HEADS)
    d = tl.arange(0, DP)
    at = q + (line_token * q_token + head * DIM)[:, None] + d[None, :]
    query = tl.load(at, mask=shown[:, None] & (d < DIM)[None, :], other=0.0)
    query = tl.trans(query)
    weight = tl.load(weights + line_token * HEADS + head, mask=shown, other=0.0)
    out_token = token.to(tl.int64) * out_stride
    row = tl.zeros([TOKENS], tl.int64)
    if SIZE:
        row = tl.load(rows + token, mask=alive, other=0)
    while tl.max(pending.to(tl.int32), 0) > 0:
        mine = pending
        own = table
        if SIZE:
            first = tl.min(tl.where(pending, t, TOKENS), 0)
            leader = tl.max(tl.where(t == first, row, 0), 0)
            mine = pending & (row == leader)
            own = table + leader * table_stride
        low = tl.maximum(tl.min(tl.where(mine, begin, 2147483647), 0), 0)
        high = tl.minimum(tl.max(tl.where(mine, end, 0), 0), limit)
        each = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), KEYS), splits) * KEYS
        low = low + tl.program_id(1) * each
        score_keys(
            query, weight, begin, end, low, tl.minimum(low + each, high), mine,
            keys, scales, own, out, out_token, width, pages, page_stride, scale_stride,
            DIM, DP, SIZE, KEYS, one_page, TOKENS, PRESHUFFLED, COMPACT, PRECISION,
        )  # fmt: skip
        pending = pending & ~mine
