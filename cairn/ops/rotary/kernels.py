"""Kernels of rotary embeddings and of per-head norms."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous, launch_next


@triton.jit(early=(), do_not_specialize=["numbers"])
def cos_sin_kernel(
    positions, inv_freq, out, elements, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out[t] = [cos | sin] of positions[t] * inv_freq, the product in float32. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    token, pair = at // HALF, at % HALF
    position = tl.load(positions + token, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq + pair, mask=inside, other=0.0)
    tl.store(out + token * 2 * HALF + pair, tl.cos(angle), mask=inside)
    tl.store(out + token * 2 * HALF + HALF + pair, tl.sin(angle), mask=inside)


@triton.jit(early=())
def head_norm_rope_kernel(
    x, weight, cos_sin, out, x_stride, head_stride, heads, eps,
    HALF: tl.constexpr, HP: tl.constexpr, REST: tl.constexpr, RP: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rmsnorm of HEADS heads of one token (one of its GROUPS groups), then the rotation of the
    first 2 HALF elements of each, element i paired with i + HALF; the other REST elements are not
    rotated. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, group = row_and_part(GROUPS)
    width: tl.constexpr = 2 * HALF + REST
    head = group * HEADS + tl.arange(0, HEADS)
    pair, column = tl.arange(0, HP), 2 * HALF + tl.arange(0, RP)
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    behind = (head < heads)[:, None] & (column < width)[None, :]
    x += token * x_stride + head[:, None] * head_stride
    first = tl.load(x + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST > 0:
        rest = tl.load(x + column[None, :], mask=behind, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / width + eps)
    weight += head[:, None] * width
    first *= scale[:, None] * tl.load(weight + pair[None, :], mask=inside, other=0.0)
    second *= scale[:, None] * tl.load(weight + HALF + pair[None, :], mask=inside, other=0.0)
    if ROTATED:
        angle = cos_sin + token * 2 * HALF + pair
        cos = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    kind = out.dtype.element_ty
    out += (token * heads + head)[:, None] * width
    tl.store(out + pair[None, :], first.to(kind), mask=inside)
    tl.store(out + HALF + pair[None, :], second.to(kind), mask=inside)
    if REST > 0:
        rest *= scale[:, None] * tl.load(weight + column[None, :], mask=behind, other=0.0)
        tl.store(out + column[None, :], rest.to(kind), mask=behind)


@triton.jit
def apply_rope(x, at, inside, cos, sin, HALF: tl.constexpr, HP: tl.constexpr, NEOX: tl.constexpr):
    """Both rotated elements of every pair in the heads that begin at x + at [N, 1], and their
    offsets from x."""
    pair = tl.arange(0, HP)
    first_at = at + (pair if NEOX else 2 * pair)[None, :]
    second_at = at + (pair + HALF if NEOX else 2 * pair + 1)[None, :]
    first = tl.load(x + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + second_at, mask=inside, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    rotated_first = (first * cos - second * sin).to(kind)
    return rotated_first, (second * cos + first * sin).to(kind), first_at, second_at


@triton.jit
def scaled_down(x, scale, kind: tl.constexpr, SCALING: tl.constexpr):
    """x divided by a scale, rounded once. SCALING: "none": unscaled; "over": x / scale; "times": x
    * scale, where `scale` is the exact inverse of the divisor."""
    if SCALING != "none":
        x = x.to(tl.float32)
        x = tl.div_rn(x, scale) if SCALING == "over" else x * scale
    return x.to(kind)


@triton.jit(early=())
def rotate_kernel(
    q, k, positions, cos_sin, k_buffer, v_buffer, value, location,
    q_stride, q_head_stride, k_stride, k_head_stride, row_stride, buffer_stride,
    buffer_head_stride, v_stride, value_stride, q_heads, k_heads, width, k_scale, v_scale,
    HALF: tl.constexpr, HP: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    REST: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr, NEOX: tl.constexpr,
    SCALING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 HALF elements of HEADS heads of one token, in place: first those of q,
    then those of k, which may be None.

    With a k_buffer, k / k_scale is written there too, including its REST elements that are not
    rotated (RP: REST padded to a power of two), and further programs write BLOCK of the `width`
    elements of value / v_scale to v_buffer each. Tokens with a negative location are skipped.
    GROUPS: programs per token. SCALING: as in `scaled_down`. PDL: as in `await_previous`.
    """
    await_previous(PDL)
    token, group = row_and_part(GROUPS)
    pair = tl.arange(0, HP)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * row_stride + pair
    cos = tl.load(angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    before = (q_heads + HEADS - 1) // HEADS
    through = before + (k_heads + HEADS - 1) // HEADS
    if group < before:
        head = group * HEADS + tl.arange(0, HEADS)
        inside = (head < q_heads)[:, None] & (pair < HALF)[None, :]
        q += token * q_stride
        at = head[:, None] * q_head_stride
        first, second, first_at, second_at = apply_rope(q, at, inside, cos, sin, HALF, HP, NEOX)
        tl.store(q + first_at, first, mask=inside)
        tl.store(q + second_at, second, mask=inside)
    # The outer conditions are compile-time constants.
    if k is not None:  # noqa: SIM102
        if (group >= before) & (group < through):
            head = (group - before) * HEADS + tl.arange(0, HEADS)
            inside = (head < k_heads)[:, None] & (pair < HALF)[None, :]
            k += token * k_stride
            at = head[:, None] * k_head_stride
            first, second, first_at, second_at = apply_rope(k, at, inside, cos, sin, HALF, HP, NEOX)
            tl.store(k + first_at, first, mask=inside)
            tl.store(k + second_at, second, mask=inside)
            if k_buffer is not None:
                kind = k_buffer.dtype.element_ty
                slot = tl.load(location + token).to(tl.int64)
                inside = inside & (slot >= 0)
                k_buffer += slot * buffer_stride
                shift = head[:, None] * (buffer_head_stride - k_head_stride)
                first = scaled_down(first, k_scale, kind, SCALING)
                second = scaled_down(second, k_scale, kind, SCALING)
                tl.store(k_buffer + first_at + shift, first, mask=inside)
                tl.store(k_buffer + second_at + shift, second, mask=inside)
                if REST > 0:
                    column = tl.arange(0, RP)
                    inside = (head < k_heads)[:, None] & (column < REST)[None, :]
                    at += 2 * HALF + column[None, :]
                    rest = tl.load(k + at, mask=inside, other=0.0)
                    rest = scaled_down(rest, k_scale, kind, SCALING)
                    tl.store(k_buffer + at + shift, rest, mask=inside & (slot >= 0))
    if v_buffer is not None:  # noqa: SIM102
        if group >= through:
            column = (group - through) * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            read = value + token * value_stride + column
            number = tl.load(read, mask=inside, other=0.0)
            number = scaled_down(number, v_scale, v_buffer.dtype.element_ty, SCALING)
            slot = tl.load(location + token).to(tl.int64)
            v_buffer += slot * v_stride
            tl.store(v_buffer + column, number, mask=inside & (slot >= 0))


@triton.jit
def rope_angles(
    position, pair, factor, low, high, attention_factor,
    HALF: tl.constexpr, SCALED: tl.constexpr, LOG2_BASE: tl.constexpr,
):  # fmt: skip
    """cos and sin [1, HP] of a position's angles. SCALED: with YaRN's frequencies."""
    # The exponent is float64: the position multiplies any error of the frequency.
    exponent = pair.to(tl.float64) * (-LOG2_BASE / HALF)
    frequency = tl.exp2(exponent).to(tl.float32)
    if SCALED:
        ramp = (pair.to(tl.float32) - low) / (high - low)
        ramp = tl.minimum(tl.maximum(ramp, 0.0), 1.0)
        frequency = tl.div_rn(frequency, factor) * ramp + frequency * (1.0 - ramp)
    angle = position.to(tl.float32) * frequency
    return (tl.cos(angle) * attention_factor)[None, :], (tl.sin(angle) * attention_factor)[None, :]


@triton.jit(early=())
def qk_norm_rope_kernel(
    qkv, positions, q_weight, k_weight, stride, q_heads, heads, dim, eps,
    factor, low, high, attention_factor,
    HALF: tl.constexpr, HP: tl.constexpr, RP: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, NEOX: tl.constexpr, SCALED: tl.constexpr, LOG2_BASE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """rmsnorm of the heads of one token of qkv and rotation of their first 2 HALF elements, in
    place: GROUPS programs per token, HEADS heads at a time.

    RP: number of elements that are not rotated, padded to a power of two; 0: none. SCALED: as in
    `rope_angles`. A program computes the angles once for all of its heads: they cost more than a
    few heads. PDL: as in `await_previous`.
    """
    await_previous(PDL)
    token, group = row_and_part(GROUPS)
    pair = tl.arange(0, HP)
    first_in = pair if NEOX else 2 * pair
    second_in = pair + HALF if NEOX else 2 * pair + 1
    column = 2 * HALF + tl.arange(0, RP if RP > 0 else 1)
    cos, sin = rope_angles(
        tl.load(positions + token), pair, factor, low, high, attention_factor,
        HALF, SCALED, LOG2_BASE,
    )  # fmt: skip
    kind = qkv.dtype.element_ty
    for start in range(group * HEADS, heads, GROUPS * HEADS):
        head = start + tl.arange(0, HEADS)
        own = head < heads
        inside = own[:, None] & (pair < HALF)[None, :]
        base = qkv + token * stride + head[:, None] * dim
        first = tl.load(base + first_in[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(base + second_in[None, :], mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        weight = tl.where(head < q_heads, q_weight, k_weight)[:, None]
        if RP > 0:
            behind = own[:, None] & (column < dim)[None, :]
            rest = tl.load(base + column[None, :], mask=behind, other=0.0).to(tl.float32)
            total += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(total / dim + eps)[:, None]
        if RP > 0:
            factors = tl.load(weight + column[None, :], mask=behind, other=0.0).to(tl.float32)
            rest *= scale * factors
            tl.store(base + column[None, :], rest.to(kind), mask=behind)
        of_first = tl.load(weight + first_in[None, :], mask=inside, other=0.0)
        of_second = tl.load(weight + second_in[None, :], mask=inside, other=0.0)
        first *= scale * of_first.to(tl.float32)
        second *= scale * of_second.to(tl.float32)
        tl.store(base + first_in[None, :], (first * cos - second * sin).to(kind), mask=inside)
        tl.store(base + second_in[None, :], (second * cos + first * sin).to(kind), mask=inside)


@triton.jit
def heads_of(
    program, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Range of heads that a program processes, of the heads of q, k and z in order: HEADS heads, or
    with WHOLE all heads of q, of k or of z."""
    if WHOLE:
        before: tl.constexpr = Q_HEADS + KV_HEADS
        begin = tl.where(program == 0, 0, tl.where(program == 1, Q_HEADS, before))
        end = tl.where(program == 0, Q_HEADS, tl.where(program == 1, before, ALL_HEADS))
    else:
        begin = program * HEADS
        end = tl.minimum(begin + HEADS, ALL_HEADS)
    return begin, end


@triton.jit
def projected_heads(
    projected, added, token, head, inside, row_stride, added_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """The two halves [HEADS, HP] float32 of a token's heads of q, k and z."""
    pair = tl.arange(0, HP)
    of_z = head >= Q_HEADS + KV_HEADS
    # With `ADDED`, z starts as q's projection.
    source = tl.where(of_z, head - Q_HEADS - KV_HEADS, head) if ADDED else head
    at = projected + token * row_stride + source[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        more = added + token * added_stride + source[:, None] * (2 * HALF) + pair[None, :]
        summed = inside & of_z[:, None]
        kind = projected.dtype.element_ty
        first += tl.load(more, mask=summed, other=0.0).to(tl.float32)
        second += tl.load(more + HALF, mask=summed, other=0.0).to(tl.float32)
        first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    return first, second


@triton.jit(early=())
def head_squares_kernel(
    projected, added, squares, row_stride, added_stride, ranks,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, SPANS: tl.constexpr, HEADS: tl.constexpr,
    ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """squares[token, span] = mean square of q's, k's or z's heads, divided by `ranks`. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    token, span = row_and_part(SPANS)
    begin, end = heads_of(span, Q_HEADS, KV_HEADS, ALL_HEADS, HEADS, True)
    head = begin + tl.arange(0, HEADS)
    inside = (head < end)[:, None] & (tl.arange(0, HP) < HALF)[None, :]
    first, second = projected_heads(
        projected, added, token, head, inside, row_stride, added_stride,
        Q_HEADS, KV_HEADS, HALF, HP, ADDED,
    )  # fmt: skip
    by_head = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    mean = tl.sum(by_head, 0) / ((end - begin) * (2 * HALF) * ranks)
    tl.store(squares + token * SPANS + span, mean)


@triton.jit
def normed_heads(
    projected, added, weight, cos_sin, means, token, begin, end, row_stride, added_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, WHOLE: tl.constexpr,
    SPANS: tl.constexpr, ADDED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """The two halves [HEADS, HP] float32 of a token's heads begin .. end - 1, those of q, k and z
    in a row: normed and then rotated. Each head has its own mean square; with WHOLE all of them
    share one; with SPANS > 0 it is read from `means`."""
    head = begin + tl.arange(0, HEADS)
    pair = tl.arange(0, HP)
    inside = (head < end)[:, None] & (pair < HALF)[None, :]
    of_z = head >= Q_HEADS + KV_HEADS
    first, second = projected_heads(
        projected, added, token, head, inside, row_stride, added_stride,
        Q_HEADS, KV_HEADS, HALF, HP, ADDED,
    )  # fmt: skip
    if SPANS > 0:
        span = (head >= Q_HEADS).to(tl.int32) + of_z.to(tl.int32)
        mean = tl.load(means + token * SPANS + span, mask=head < end, other=0.0)
    else:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        if WHOLE:
            mean = tl.where(head < end, tl.sum(mean, 0) / (end - begin), 0.0)
    scale = tl.rsqrt(mean + eps)
    of_weight = weight + head[:, None] * (2 * HALF) + pair[None, :]
    first *= scale[:, None] * tl.load(of_weight, mask=inside, other=0.0).to(tl.float32)
    second *= scale[:, None] * tl.load(of_weight + HALF, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        angle = cos_sin + token * 2 * HALF + pair
        cos = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    return first, second


@triton.jit
def store_halves(to, head, own, first, second, stride, HALF: tl.constexpr, HP: tl.constexpr):
    """Write the two halves [HEADS, HP] of the heads selected by the mask `own`; `stride` elements
    from head to head."""
    pair = tl.arange(0, HP)
    inside = own[:, None] & (pair < HALF)[None, :]
    at = to + head[:, None] * stride + pair[None, :]
    tl.store(at, first.to(to.dtype.element_ty), mask=inside)
    tl.store(at + HALF, second.to(to.dtype.element_ty), mask=inside)


@triton.jit(early=())
def split_norm_rope_kernel(
    projected, added, weight, cos_sin, means, q, k, z, row_stride, added_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, PROGRAMS: tl.constexpr, HEADS: tl.constexpr,
    WHOLE: tl.constexpr, SPANS: tl.constexpr, ADDED: tl.constexpr, ROTATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads of one token and write those of q, k and z to their own tensors; see
    `split_norm_rope`.

    Args:
        PROGRAMS: programs per token.
        HEADS: heads per program. WHOLE: a program takes all heads of q, k or z, which share a norm.
        SPANS: columns of the given means [T, SPANS]; 0: no means are given.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    token, program = row_and_part(PROGRAMS)
    begin, end = heads_of(program, Q_HEADS, KV_HEADS, ALL_HEADS, HEADS, WHOLE)
    first, second = normed_heads(
        projected, added, weight, cos_sin, means, token, begin, end, row_stride, added_stride, eps,
        Q_HEADS, KV_HEADS, HALF, HP, HEADS, WHOLE, SPANS, ADDED, ROTATED,
    )  # fmt: skip
    head = begin + tl.arange(0, HEADS)
    width: tl.constexpr = 2 * HALF
    before: tl.constexpr = Q_HEADS + KV_HEADS
    own = (head < Q_HEADS) & (head < end)
    store_halves(q + token * Q_HEADS * width, head, own, first, second, width, HALF, HP)
    own = (head >= Q_HEADS) & (head < before) & (head < end)
    to_k = k + token * KV_HEADS * width
    store_halves(to_k, head - Q_HEADS, own, first, second, width, HALF, HP)
    own = (head >= before) & (head < end)
    store_halves(z + token * Q_HEADS * width, head - before, own, first, second, width, HALF, HP)


@triton.jit(early=("location",))
def heads_into_cache_kernel(
    projected, added, weight, cos_sin, means, q, z, k_cache, v_cache, location,
    row_stride, added_stride, page_stride, head_stride, eps,
    SIZE: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr,
    V_HEAD: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr, KVP: tl.constexpr, WHOLE: tl.constexpr, SPANS: tl.constexpr,
    ADDED: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`split_norm_rope_kernel` with k written to its slot in the cache; the last program of a token
    copies v to the cache.

    Args:
        V_HEAD: index of v's first head in a row of `projected`.
        KVP: KV_HEADS, padded to a power of two.
        PDL: as in `await_previous`.
    """
    launch_next(PDL)
    token, program = row_and_part(PROGRAMS)
    at = tl.load(location + token)
    to = (at // SIZE) * page_stride + (at % SIZE) * (2 * HALF)
    await_previous(PDL)
    if program == PROGRAMS - 1:
        if at >= 0:
            head = tl.arange(0, KVP)
            pair = tl.arange(0, HP)
            own = head < KV_HEADS
            inside = own[:, None] & (pair < HALF)[None, :]
            v = projected + token * row_stride + (V_HEAD + head)[:, None] * (2 * HALF)
            first = tl.load(v + pair[None, :], mask=inside)
            second = tl.load(v + HALF + pair[None, :], mask=inside)
            store_halves(v_cache + to, head, own, first, second, head_stride, HALF, HP)
    else:
        begin, end = heads_of(program, Q_HEADS, KV_HEADS, ALL_HEADS, HEADS, WHOLE)
        first, second = normed_heads(
            projected, added, weight, cos_sin, means, token, begin, end,
            row_stride, added_stride, eps,
            Q_HEADS, KV_HEADS, HALF, HP, HEADS, WHOLE, SPANS, ADDED, ROTATED,
        )  # fmt: skip
        head = begin + tl.arange(0, HEADS)
        width: tl.constexpr = 2 * HALF
        before: tl.constexpr = Q_HEADS + KV_HEADS
        own = (head < Q_HEADS) & (head < end)
        store_halves(q + token * Q_HEADS * width, head, own, first, second, width, HALF, HP)
        own = (head >= Q_HEADS) & (head < before) & (head < end) & (at >= 0)
        store_halves(k_cache + to, head - Q_HEADS, own, first, second, head_stride, HALF, HP)
        own = (head >= before) & (head < end)
        to_z = z + token * Q_HEADS * width
        store_halves(to_z, head - before, own, first, second, width, HALF, HP)
