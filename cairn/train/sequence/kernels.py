"""Kernels of sequence_attention: a program holds the query heads of one group, for a few slots.

Row r of a tile is query r // GP of the block and head r % GP of the group, so that the rows share
their pages. Logits and sums are float32; what meets a product is in the operands' dtype.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def _rows(block, group, L, H, G: tl.constexpr, GP: tl.constexpr, ROWS: tl.constexpr):
    """Slot, line (slot * H + head) and validity of a tile's rows."""
    row = tl.arange(0, ROWS)
    slot = block * (ROWS // GP) + row // GP
    head = row % GP
    valid = (slot < L) & (head < G)
    return slot, slot.to(tl.int64) * H + group * G + head, head, valid


@triton.jit
def _tile(X, line, valid, D: tl.constexpr):
    """[rows, D] of the lines."""
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(X + at, mask=valid[:, None], other=0.0)


@triton.jit
def _page(X, page, group, KV, D: tl.constexpr, S: tl.constexpr):
    """[S, D], one KV head's keys or values of a page."""
    at = ((page * S + tl.arange(0, S)).to(tl.int64) * KV + group)[:, None] * D
    return tl.load(X + at + tl.arange(0, D)[None, :])


@triton.jit
def _first_slot(slot, window, S: tl.constexpr, ALIGNED: tl.constexpr):
    """First slot of the window."""
    first = tl.maximum(slot - window + 1, 0)
    if ALIGNED:
        first = first // S * S
    return first


@triton.jit
def _visible(slot, first, page, S: tl.constexpr, MASK: tl.constexpr):
    """[rows, S], the keys of a page under the window."""
    key = page * S + tl.arange(0, S)
    seen = (key[None, :] <= slot[:, None]) & (key[None, :] >= first[:, None])
    if MASK:
        seen = seen & (tl.arange(0, S)[None, :] < S - 1)
    return seen


@triton.jit
def _inside(logits, S: tl.constexpr):
    """Softmax over a page's slots but the last."""
    logits = tl.where(tl.arange(0, S)[None, :] < S - 1, logits, float("-inf"))
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def _logit_of(chosen, u, page):
    """u of a page [rows]; -inf where the row has not selected it."""
    return tl.max(tl.where(chosen == page, u, float("-inf")), 1)


@triton.jit
def _selection(IDX, U, slot, line, head, valid, group, KV, K: tl.constexpr, KP: tl.constexpr):
    """Selected pages and their u, [rows, KP] each."""
    j = tl.arange(0, KP)
    inside = valid[:, None] & (j < K)[None, :]
    at = (slot.to(tl.int64) * KV + group)[:, None] * K + j[None, :]
    chosen = tl.load(IDX + at, mask=inside, other=-1)
    u = tl.load(U + line[:, None] * K + j[None, :], mask=inside, other=float("-inf"))
    return chosen, u


@triton.jit
def window_kernel(
    Q, K, V, OUT, LSE, L, H, KV, scale, window,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over the window alone: OUT [B, L, H, D] and its LSE [B, L, H]."""
    block, group = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot, line, _head, valid = _rows(block, group, L, H, G, GP, ROWS)
    line += b * L * H
    first = _first_slot(slot, window, S, ALIGNED)
    q = _tile(Q, line, valid, D)
    K += b * L * KV * D
    V += b * L * KV * D
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    begin = _first_slot(block * (ROWS // GP), window, S, ALIGNED) // S
    end = tl.cdiv(tl.minimum((block + 1) * (ROWS // GP), L), S)
    for page in range(begin, end):
        k = _page(K, page, group, KV, D, S)
        v = _page(V, page, group, KV, D, S)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits = tl.where(_visible(slot, first, page, S, MASK), logits, float("-inf"))
        new = tl.maximum(m, tl.max(logits, 1))
        # A row that has seen no key yet must not subtract infinities.
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(logits - safe[:, None])
        old = tl.exp(m - safe)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = new
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    out = acc / total[:, None]
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=valid[:, None])
    tl.store(LSE + line, m + tl.log(total), mask=valid)


@triton.jit
def pages_kernel(
    Q, K, V, IDX, U, LIST, COUNT, WINDOW, WINDOW_LSE, OUT, LSE, MASS, L, H, KV, N, scale,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
    TOPK: tl.constexpr, KP: tl.constexpr, SOFTMAX1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Selected pages on top of the window: OUT, LSE of the whole softmax, MASS of the pages."""
    block, group = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot, line, head, valid = _rows(block, group, L, H, G, GP, ROWS)
    line += b * L * H
    chosen, u = _selection(IDX + b * L * KV * TOPK, U, slot, line, head, valid, group, KV, TOPK, KP)
    q = _tile(Q, line, valid, D)
    K += b * L * KV * D
    V += b * L * KV * D
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    lse = tl.load(WINDOW_LSE + line, mask=valid, other=0.0)
    # All weights are relative to the largest logit, which is known before any page is read.
    m = tl.maximum(lse, tl.max(u, 1))
    if SOFTMAX1:
        m = tl.maximum(m, 0.0)
    share = tl.exp(lse - m)
    mass = tl.sum(tl.exp(u - m[:, None]), 1)
    total = share + mass
    if SOFTMAX1:
        total += tl.exp(-m)
    acc = tl.load(WINDOW + at, mask=valid[:, None], other=0.0) * share[:, None]
    lists = (b * KV + group) * tl.num_programs(0) + block
    for i in range(tl.load(COUNT + lists)):
        page = tl.load(LIST + lists * N + i)
        k = _page(K, page, group, KV, D, S)
        v = _page(V, page, group, KV, D, S)
        p = _inside(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, S)
        p = p * tl.exp(_logit_of(chosen, u, page) - m)[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=valid[:, None])
    tl.store(LSE + line, m + tl.log(total), mask=valid)
    tl.store(MASS + line, mass / total, mask=valid)


@triton.jit
def queries_kernel(
    Q, K, V, R, IDX, U, LIST, COUNT, DO, DMASS, LSE, DELTA, DQ, DZ, L, H, KV, N, scale, window,
    G: tl.constexpr, GP: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, MASK: tl.constexpr, TOPK: tl.constexpr,
    KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries and landmark queries."""
    block, group = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot, line, head, valid = _rows(block, group, L, H, G, GP, ROWS)
    line += b * L * H
    q, do = _tile(Q, line, valid, D), _tile(DO, line, valid, D)
    # Padding rows have lse = inf, so all of their weights are 0.
    lse = tl.load(LSE + line, mask=valid, other=float("inf"))
    delta = tl.load(DELTA + line, mask=valid, other=0.0)
    K += b * L * KV * D
    V += b * L * KV * D
    dq = tl.zeros([ROWS, D], tl.float32)
    first = _first_slot(slot, window, S, ALIGNED)
    begin = _first_slot(block * (ROWS // GP), window, S, ALIGNED) // S
    end = tl.cdiv(tl.minimum((block + 1) * (ROWS // GP), L), S)
    for page in range(begin, end):
        k = _page(K, page, group, KV, D, S)
        v = _page(V, page, group, KV, D, S)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits = tl.where(_visible(slot, first, page, S, MASK), logits, float("-inf"))
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = tl.exp(logits - lse[:, None]) * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    if TOPK:
        dz = tl.zeros([ROWS, D], tl.float32)
        chosen, u = _selection(
            IDX + b * L * KV * TOPK, U, slot, line, head, valid, group, KV, TOPK, KP
        )
        lost = delta - tl.load(DMASS + line, mask=valid, other=0.0)
        own = tl.arange(0, HP)
        lists = (b * KV + group) * tl.num_programs(0) + block
        for i in range(tl.load(COUNT + lists)):
            page = tl.load(LIST + lists * N + i)
            k = _page(K, page, group, KV, D, S)
            v = _page(V, page, group, KV, D, S)
            p = _inside(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, S)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            mean = tl.sum(p * dp, 1)
            weight = tl.exp(_logit_of(chosen, u, page) - lse)
            ds = p * weight[:, None] * (dp - mean[:, None])
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
            du = weight * (mean - lost)
            keys = ((b * N + page) * H + group * G + own)[:, None] * D
            r = tl.load(R + keys + tl.arange(0, D)[None, :], mask=(own < G)[:, None], other=0.0)
            du = tl.where(head[:, None] == own[None, :], du[:, None], 0.0)
            dz += tl.dot(du.to(r.dtype), r, input_precision=PRECISION)
        tl.store(DZ + at, (dz * scale).to(DZ.dtype.element_ty), mask=valid[:, None])
    tl.store(DQ + at, (dq * scale).to(DQ.dtype.element_ty), mask=valid[:, None])


@triton.jit
def keys_kernel(
    Q, K, V, Z, IDX, U, LIST, COUNT, DO, DMASS, LSE, DELTA, DK, DV, DR, DB,
    L, H, KV, BLOCKS, scale, window,
    G: tl.constexpr, GP: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, MASK: tl.constexpr, TOPK: tl.constexpr,
    KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a page's keys and values and of its summary."""
    page, group = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    N = tl.num_programs(0)
    K += b * L * KV * D
    V += b * L * KV * D
    k = _page(K, page, group, KV, D, S)
    v = _page(V, page, group, KV, D, S)
    dk = tl.zeros([S, D], tl.float32)
    dv = tl.zeros([S, D], tl.float32)
    # The last window that reaches this page starts in it.
    end = tl.minimum((page + 1) * S + window - 1, L)
    for block in range(page * S // (ROWS // GP), tl.cdiv(end, ROWS // GP)):
        slot, line, head, valid = _rows(block, group, L, H, G, GP, ROWS)
        line += b * L * H
        first = _first_slot(slot, window, S, ALIGNED)
        q, do = _tile(Q, line, valid, D), _tile(DO, line, valid, D)
        lse = tl.load(LSE + line, mask=valid, other=float("inf"))
        delta = tl.load(DELTA + line, mask=valid, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits = tl.where(_visible(slot, first, page, S, MASK), logits, float("-inf"))
        p = tl.exp(logits - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
    if TOPK:
        own = tl.arange(0, HP)
        dr = tl.zeros([HP, D], tl.float32)
        db = tl.zeros([HP], tl.float32)
        lists = (b * KV + group) * N + page
        for i in range(tl.load(COUNT + lists)):
            block = tl.load(LIST + lists * BLOCKS + i)
            slot, line, head, valid = _rows(block, group, L, H, G, GP, ROWS)
            line += b * L * H
            chosen, u = _selection(
                IDX + b * L * KV * TOPK, U, slot, line, head, valid, group, KV, TOPK, KP
            )
            q, do = _tile(Q, line, valid, D), _tile(DO, line, valid, D)
            lse = tl.load(LSE + line, mask=valid, other=float("inf"))
            lost = tl.load(DELTA + line, mask=valid, other=0.0)
            lost -= tl.load(DMASS + line, mask=valid, other=0.0)
            p = _inside(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, S)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            mean = tl.sum(p * dp, 1)
            weight = tl.exp(_logit_of(chosen, u, page) - lse)
            p = p * weight[:, None]
            ds = p * (dp - mean[:, None])
            dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
            z = _tile(Z, line, valid, D)
            du = weight * (mean - lost)
            du = tl.where(head[:, None] == own[None, :], du[:, None], 0.0)
            db += tl.sum(du, 0)
            dr += tl.dot(tl.trans(du.to(z.dtype)), z, input_precision=PRECISION)
        keys = (b * N + page) * H + group * G + own
        at = keys[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(DR + at, (dr * scale).to(DR.dtype.element_ty), mask=(own < G)[:, None])
        tl.store(DB + keys, db, mask=own < G)
    at = ((page * S + tl.arange(0, S)).to(tl.int64) * KV + group)[:, None] * D
    at += b * L * KV * D + tl.arange(0, D)[None, :]
    tl.store(DK + at, (dk * scale).to(DK.dtype.element_ty))
    tl.store(DV + at, dv.to(DV.dtype.element_ty))
