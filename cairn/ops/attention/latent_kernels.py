"""The kernel of MLA's decode attention: all heads share the rows of the cache."""

from __future__ import annotations

from cairn.ops.attention.kernels import add_values, block_of, finish, load_rows, store_rows
from cairn.ops.gpu import tl, triton


@triton.jit
def latent_split_kernel(
    q_nope, q_pe, cache, values, keys, seq_lens, page_table, o, lse, scale,
    nope_row, nope_head, pe_row, pe_head, page_stride, slot_stride, page_lines, table_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LP: tl.constexpr, RP: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a row's query heads over one split of its slots. A slot holds [LATENT | ROPE]
    elements: the key of every head; the first LATENT are the value.

    o: [B, HEADS, splits, LATENT]; lse: [B, HEADS, splits] float32.

    Args:
        values, keys: TMA tables of the cache's two parts, as in `block_of`, for whole blocks; or
            None.
    """
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * LINES + tl.arange(0, LINES)
    alive = head < HEADS
    length = tl.load(seq_lens + row).to(tl.int32)
    each = (tl.cdiv(length, KEYS) + splits - 1) // splits
    begin = split * each * KEYS
    end = tl.minimum(begin + each * KEYS, length)
    latent = load_rows(q_nope + row * nope_row + head * nope_head, alive, LATENT, LP)
    rope = load_rows(q_pe + row * pe_row + head * pe_head, alive, ROPE, RP)
    best = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, LP], tl.float32)
    factor = scale * 1.4426950408889634
    table = page_table + row * table_stride
    if values is not None:
        whole = tl.maximum(end // KEYS * KEYS, begin)
        for start in range(begin, whole, KEYS):
            value = block_of(values, start, 0, page_lines, 0, table, SIZE, True)
            key = block_of(keys, start, 0, page_lines, 0, table, SIZE, True)
            logits = tl.dot(latent, tl.trans(value), input_precision=PRECISION)
            logits = tl.dot(rope, tl.trans(key), logits, input_precision=PRECISION) * factor
            best, total, acc = add_values(best, total, acc, logits, value, False, PRECISION)
        begin = whole
    for start in range(begin, end, KEYS):
        t = start + tl.arange(0, KEYS)
        inside = t < end
        page = tl.load(table + t // SIZE, mask=inside, other=0).to(tl.int64)
        line = cache + page * page_stride + (t % SIZE).to(tl.int64) * slot_stride
        value = load_rows(line, inside, LATENT, LP)
        key = load_rows(line + LATENT, inside, ROPE, RP)
        logits = tl.dot(latent, tl.trans(value), input_precision=PRECISION)
        logits = tl.dot(rope, tl.trans(key), logits, input_precision=PRECISION) * factor
        logits = tl.where(inside[None, :], logits, float("-inf"))
        best, total, acc = add_values(best, total, acc, logits, value, False, PRECISION)
    result, logs = finish(best, total, acc)
    place = (row * HEADS + head) * splits + split
    store_rows(o + place * LATENT, result, alive, LATENT, LP)
    tl.store(lse + place, logs, mask=alive)
