"""The gated delta rule in chunks (see `recurrence`), on tensor cores.

`chunk_kernel` computes the terms that do not depend on the state, for all chunks in parallel; then
`carry_kernel` propagates the states from chunk to chunk. With G the running sum of log decays in a
chunk, D[i, j] = e^(G_i - G_j), and l the inverse l2 norms of keys and queries:

    A = the part of beta_i l_i l_j (k_i . k_j) D[i, j] below the diagonal
    T = (I + A)^-1,  P = scale l_i l_j (q_i . k_j) D[i, j] on and below the diagonal
    N = T (beta v - (beta e^G l) (k S)),  o = (scale e^G l) (q S) + P N
    S = e^(G_n) S + k^T ((e^(G_n - G) l) N)

The state S is [K, V] here. Tensor-core products use keys and queries as given, which are exact in
half precision; factors are applied to the products.
"""

from __future__ import annotations

from cairn.ops.gpu import constant, tl, triton
from cairn.ops.mamba.kernels.recurrent import FEW, GRID, log_decay, sigmoid

FACTORS = constant(4)
"""Factors per token of a chunk and head that `chunk_kernel` passes to `carry_kernel`: beta;
beta e^G l; scale e^G l; e^(G_n - G) l."""


@triton.jit
def chunk_table_kernel(
    starts, first, table, before, count, length, most, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Lines of one sequence's chunks in the table [most, 4]: sequence, index of the chunk's first
    token in the step, begin and end of the sequence; `before`: the number of chunks in front of
    the sequence. The last sequence also marks unused lines with -1.

    starts: [count + 1], or None: sequences have `length` tokens. first: [count], slots of first
    tokens, or None: 0.
    """
    number, other = tl.program_id(0), tl.arange(0, COUNT)
    earlier = other < number
    if starts is None:
        own_begin = number * length
        own_end = own_begin + length
        begin, end = other * length, other * length + length
    else:
        own_begin = tl.load(starts + number).to(tl.int32)
        own_end = tl.load(starts + number + 1).to(tl.int32)
        begin = tl.load(starts + other, mask=earlier, other=0).to(tl.int32)
        end = tl.load(starts + other + 1, mask=earlier, other=0).to(tl.int32)
    if first is None:
        shift, own_shift = tl.zeros_like(begin), 0
    else:
        shift = tl.load(first + other, mask=earlier, other=0).to(tl.int32) % GRID
        own_shift = tl.load(first + number).to(tl.int32) % GRID
    chunks = tl.where(earlier & (end > begin), (shift + end - begin + GRID - 1) // GRID, 0)
    behind = tl.sum(chunks, 0)
    own = tl.where(own_end > own_begin, (own_shift + own_end - own_begin + GRID - 1) // GRID, 0)
    tl.store(before + number, behind)
    # Mark chunks after the last sequence as unused too.
    rows = tl.where(number == count - 1, most - behind, own)
    for i in range(0, rows, BLOCK):
        chunk = i + tl.arange(0, BLOCK)
        at, inside = table + (behind + chunk) * 4, chunk < rows
        tl.store(at, tl.where(chunk < own, number, -1), mask=inside)
        tl.store(at + 1, own_begin - own_shift + chunk * GRID, mask=inside)
        tl.store(at + 2, own_begin, mask=inside)
        tl.store(at + 3, own_end, mask=inside)


@triton.jit
def inverse(a, DTYPE: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [64, 64], from inverted diagonal blocks of 2 x 2
    to larger ones: below two neighbouring blocks T the inverse is -T A T. Factors of products are
    rounded to DTYPE."""
    i = tl.arange(0, GRID)
    pair = (i[:, None] // 2 == i[None, :] // 2) & (i[:, None] > i[None, :])
    t = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pair, -a, 0.0))
    for level in tl.static_range(1, 6):
        inner, wider = i >> level, i >> (level + 1)
        lower = (inner[:, None] > inner[None, :]) & (wider[:, None] == wider[None, :])
        rounded = t.to(DTYPE)
        below = tl.dot(tl.where(lower, a, 0.0).to(DTYPE), rounded)
        t -= tl.dot(rounded, below.to(DTYPE))
    return t


@triton.jit
def chunk_kernel(
    q, k, a, b, a_log, dt_bias, starts, stored, table, weights, scores, factors, decays, out,
    tokens, count, length, scale, beta, threshold, q_token, q_head, k_token, k_head,
    a_token, b_token, HEADS: tl.constexpr, EACH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALISED: tl.constexpr, RAW: tl.constexpr,
    FEW_APART: tl.constexpr,
):  # fmt: skip
    """T, P and the factors of one chunk in one value head; after the last sequence o = 0.

    RAW: a and b are projections; else log decay and strength. FEW_APART: chunks of up to FEW tokens
    at the end of longer sequences, and sequences of up to FEW tokens, are left to
    `recurrent_kernel`.
    table: as in `chunk_table_kernel`. weights, scores: [T, HEADS, 64], rows of T and P. factors:
    [chunks, HEADS, FACTORS, 64]. decays: [chunks, HEADS], e^(G_n).
    """
    program, head = tl.program_id(0), tl.program_id(1)
    all_end = count * length if starts is None else tl.load(starts + count).to(tl.int32)
    i = tl.arange(0, GRID)
    line = tl.arange(0, BLOCK_V)
    spare = program * GRID + i
    empty = ((spare >= all_end) & (spare < tokens))[:, None] & (line < V)[None, :]
    place = (spare.to(tl.int64)[:, None] * HEADS + head) * V + line[None, :]
    tl.store(out + place, tl.zeros((GRID, BLOCK_V), out.dtype.element_ty), mask=empty)
    sequence, at = tl.load(table + program * 4), tl.load(table + program * 4 + 1)
    begin, end = tl.load(table + program * 4 + 2), tl.load(table + program * 4 + 3)
    if sequence < 0:
        return
    if FEW_APART:
        few = (at + GRID >= end) & (end - at <= FEW) & (tl.load(stored + sequence) >= 0)
        if few | (end - begin <= FEW):
            return
    token = (at + i).to(tl.int64)
    inside = (token >= begin) & (token < end)
    column = tl.arange(0, BLOCK_K)
    wide = inside[:, None] & (column < K)[None, :]
    key_head = head // EACH
    query = tl.load(q + token[:, None] * q_token + key_head * q_head + column[None, :], wide, 0.0)
    key = tl.load(k + token[:, None] * k_token + key_head * k_head + column[None, :], wide, 0.0)
    g = tl.load(a + token * a_token + head, mask=inside, other=0.0).to(tl.float32)
    strength = tl.load(b + token * b_token + head, mask=inside, other=0.0).to(tl.float32)
    if RAW:
        g = log_decay(
            tl.load(a_log + head).to(tl.float32), g + tl.load(dt_bias + head).to(tl.float32),
            beta, threshold,
        )  # fmt: skip
        strength = sigmoid(strength)
    g, strength = tl.where(inside, g, 0.0), tl.where(inside, strength, 0.0)
    q_length, k_length = tl.full((GRID,), 1.0, tl.float32), tl.full((GRID,), 1.0, tl.float32)
    if NORMALISED:
        q32, k32 = query.to(tl.float32), key.to(tl.float32)
        q_length = tl.rsqrt(tl.sum(q32 * q32, 1) + 1e-6)
        k_length = tl.rsqrt(tl.sum(k32 * k32, 1) + 1e-6)
    # In float64, because differences of large sums are used.
    total = tl.cumsum(g.to(tl.float64), 0)
    last = tl.sum(tl.where(i == GRID - 1, total, 0.0), 0)
    apart = (total[:, None] - total[None, :]).to(tl.float32)
    d = tl.exp(tl.where(i[:, None] >= i[None, :], apart, float("-inf"))) * k_length[None, :]
    grown = tl.exp(total.to(tl.float32))
    rows = (token * HEADS + head)[:, None] * GRID + i[None, :]
    p = (scale * q_length)[:, None] * tl.dot(query, tl.trans(key)) * d
    tl.store(scores + rows, p.to(scores.dtype.element_ty), mask=inside[:, None])
    below = i[:, None] > i[None, :]
    lower = (strength * k_length)[:, None] * tl.dot(key, tl.trans(key)) * d
    # Of keys with length 1, and strengths of at most 1, no number of T is larger than 1: half
    # precision keeps as many digits of it as TF32.
    halves: tl.constexpr = NORMALISED and q.dtype.element_ty != tl.float32
    t = inverse(tl.where(below, lower, 0.0), tl.float16 if halves else tl.float32)
    tl.store(weights + rows, t.to(weights.dtype.element_ty), mask=inside[:, None])
    place = factors + (program * HEADS + head) * (FACTORS * GRID) + i
    tl.store(place, strength)
    tl.store(place + GRID, strength * grown * k_length)
    tl.store(place + 2 * GRID, scale * grown * q_length)
    tl.store(place + 3 * GRID, tl.exp((last - total).to(tl.float32)) * k_length)
    tl.store(decays + program * HEADS + head, tl.exp(last.to(tl.float32)))


@triton.jit
def carry_kernel(
    q, k, v, weights, scores, factors, decays, before, out, pool, slots, stored, has_initial_state,
    starts, first, length, q_token, q_head, k_token, k_head, v_token, v_head, HEADS: tl.constexpr,
    EACH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, FEW_APART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One sequence in one value head, BLOCK_V columns of its state, from chunk to chunk.

    Arguments as in `chunk_kernel`, states as in `recurrent_kernel`.
    """
    parts: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    part, head, number = tl.program_id(0) % parts, tl.program_id(0) // parts, tl.program_id(1)
    begin = number * length if starts is None else tl.load(starts + number).to(tl.int32)
    end = begin + length if starts is None else tl.load(starts + number + 1).to(tl.int32)
    shift = 0 if first is None else tl.load(first + number).to(tl.int32) % GRID
    chunk = tl.load(before + number)
    slot = number.to(tl.int64) if slots is None else tl.load(slots + number).to(tl.int64)
    target = slot if stored is None else tl.load(stored + number).to(tl.int64)
    used = slot >= 0
    if has_initial_state is not None:
        used = used & tl.load(has_initial_state + number).to(tl.int1)
    chunks = tl.where(end > begin, (shift + end - begin + GRID - 1) // GRID, 0)
    if FEW_APART:
        if (end - begin <= FEW) & (end > begin):
            return
        rest = end - (begin - shift + (chunks - 1) * GRID)
        chunks -= ((rest <= FEW) & (target >= 0)).to(tl.int32)
    i, column = tl.arange(0, GRID), tl.arange(0, BLOCK_K)
    line = part * BLOCK_V + tl.arange(0, BLOCK_V)
    wide, high = column < K, line < V
    cell = head * (V * K) + line[None, :] * K + column[:, None]
    held = wide[:, None] & high[None, :]
    state = tl.load(pool + slot * (HEADS * V * K) + cell, mask=held & used, other=0.0)
    dtype = v.dtype.element_ty
    # A chunk's first token is a scalar; offsets inside a chunk fit in 32 bits.
    first_token = (begin - shift).to(tl.int64)
    key_head = head // EACH
    q_place = i[:, None] * q_token + key_head * q_head + column[None, :]
    k_place = i[:, None] * k_token + key_head * k_head + column[None, :]
    v_place = i[:, None] * v_token + head * v_head + line[None, :]
    square = (i[:, None] * HEADS + head) * GRID + i[None, :]
    o_place = (i[:, None] * HEADS + head) * V + line[None, :]
    for n in tl.range(0, chunks, num_stages=STAGES):
        token = first_token + n * GRID
        inside = (i >= begin - token) & (i < end - token)
        row = inside[:, None] & wide[None, :]
        query = tl.load(q + token * q_token + q_place, mask=row, other=0.0)
        key = tl.load(k + token * k_token + k_place, mask=row, other=0.0)
        filled = inside[:, None] & high[None, :]
        value = tl.load(v + token * v_token + v_place, mask=filled, other=0.0)
        rows = token * (HEADS * GRID)
        t = tl.load(weights + rows + square, mask=inside[:, None], other=0.0)
        p = tl.load(scores + rows + square, mask=inside[:, None], other=0.0)
        place = factors + ((chunk + n) * HEADS + head) * (FACTORS * GRID) + i
        strength = tl.load(place)
        read = tl.load(place + GRID)
        seen = tl.load(place + 2 * GRID)
        left = tl.load(place + 3 * GRID)
        decay = tl.load(decays + (chunk + n) * HEADS + head)
        rounded = state.to(dtype)
        x = tl.dot(key, rounded)
        x = strength[:, None] * value.to(tl.float32) - read[:, None] * x
        new = tl.dot(t, x.to(dtype))
        o = seen[:, None] * tl.dot(query, rounded)
        o += tl.dot(p, new.to(dtype))
        place = out + token * (HEADS * V) + o_place
        tl.store(place, o.to(out.dtype.element_ty), mask=filled)
        new = (left[:, None] * new).to(dtype)
        state = decay * state + tl.dot(tl.trans(key), new)
    tl.store(pool + target * (HEADS * V * K) + cell, state, mask=held & (target >= 0))
