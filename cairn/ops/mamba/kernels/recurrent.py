"""The gated delta rule token by token, with its gates."""

from __future__ import annotations

from cairn.ops.gpu import constant, tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous

GRID = constant(64)
"""Chunks of the delta rule begin at multiples of it in their sequence."""
FEW = constant(16)
"""Up to this many tokens after the last multiple of GRID run token by token."""


@triton.jit
def log_plus_one(y):
    """log(1 + y) of y >= 0, exact for small y too."""
    whole = 1 + y
    return tl.where(whole == 1, y, tl.log(whole) * (y / (whole - 1)))


@triton.jit
def log_decay(rate, x, beta, threshold):
    """-e^rate * softplus(x)."""
    soft = tl.where(beta * x > threshold, x, log_plus_one(tl.exp(beta * x)) / beta)
    return -tl.exp(rate) * soft


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def normed(x, NORMALISED: tl.constexpr):
    """x [K] divided by sqrt(sum of squares + 1e-6), if NORMALISED."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6) if NORMALISED else x


@triton.jit
def shifted(x, shift, inside):
    """The sum of the values at two addresses, float32."""
    number = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    return number + tl.load(shift, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def gates(
    a, b, a_log, dt_bias, head, column, wide, beta, threshold,
    K: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """Decay and write strength of a token in one head; a, b: addresses of its inputs. See
    `recurrent_kernel`."""
    strength = tl.load(b).to(tl.float32)
    if a_log is None:
        decay = tl.exp(tl.load(a).to(tl.float32))
    else:
        rate = tl.load(a_log + head).to(tl.float32)
        if BY_COLUMN:
            x = shifted(a + column, dt_bias + head * K + column, wide)
        else:
            x = shifted(a, dt_bias + head, True)
        decay = tl.exp(log_decay(rate, x, beta, threshold))
        strength = sigmoid(strength)
    return decay, strength


@triton.jit
def place_in(starts, number, length):
    """Begin and end of a sequence; see `recurrent_kernel`."""
    begin, end = number * length, number * length + length
    if starts is not None:
        begin = tl.load(starts + number).to(tl.int64)
        end = tl.load(starts + number + 1).to(tl.int64)
    return begin, end


@triton.jit
def clear(at, first, end, stride, inside):
    """Store 0 at the addresses of tokens first .. end - 1."""
    for token in range(first, end):
        tl.store(at + token * stride, tl.zeros(at.shape, at.dtype.element_ty), mask=inside)


@triton.jit(early=())
def recurrent_kernel(
    q, k, v, a, b, a_log, dt_bias, out, pool, slots, stored, has_initial_state, starts, first,
    buffer, rows, parents, trail, tokens, length, scale, beta, threshold, q_token, q_head,
    k_token, k_head, v_token, v_head, a_token, a_head, b_token,
    buffer_stride, parents_stride, trail_stride, HEADS: tl.constexpr, EACH: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NORMALISED: tl.constexpr, BY_COLUMN: tl.constexpr, UPDATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence in one value head, BLOCK_V rows of its state. PDL: as in `await_previous`.

    starts: [N + 1], or None: each sequence has `length` tokens. tokens: of all sequences; outputs
    after the last become 0. stored: slots of final states, or None: `slots`. first: [N], slots of
    first tokens: tokens up to the last multiple of GRID were run in chunks, only those after it are
    run here, if they are FEW at most, and sequences of up to FEW; None: all are run. buffer, rows:
    states after each token go to buffer[rows[n]]. parents: [N, steps], the step whose state, kept
    in `trail` [N, steps, HEADS, V, K], each step continues from. BY_COLUMN: `a` has a decay for
    each column of the state. a_log None: `a` is the log decay, `b` the strength.
    """
    await_previous(PDL)
    program, part = row_and_part((V + BLOCK_V - 1) // BLOCK_V)
    number, head = program // HEADS, program % HEADS
    begin, end = place_in(starts, number, length)
    slot = number if slots is None else tl.load(slots + number).to(tl.int64)
    target = slot if stored is None else tl.load(stored + number).to(tl.int64)
    used = slot >= 0
    if has_initial_state is not None:
        used = used & tl.load(has_initial_state + number).to(tl.int1)
    if first is not None:
        slot_of_first = tl.load(first + number).to(tl.int64)
        behind = (slot_of_first + end - begin) // GRID * GRID - slot_of_first
        tail = tl.where(end - begin <= FEW, begin, tl.maximum(begin, begin + behind))
        if (end - tail > FEW) | (end == tail) | ((tail > begin) & (target < 0)):
            return
        # The chunks stored their state in the target slot.
        slot, used = tl.where(tail > begin, target, slot), used | (tail > begin)
        begin = tail
    column, line = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    wide, high = column < K, line < V
    inside = high[:, None] & wide[None, :]
    cell = (head * V + line)[:, None] * K + column[None, :]
    state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
    if pool is not None:
        place = pool + slot * (HEADS * V * K) + cell
        state = tl.load(place, mask=inside & used, other=0.0)
    initial = state
    row = number if rows is None else tl.load(rows + number).to(tl.int64)
    key_head = head // EACH
    for token in range(begin, end):
        if parents is not None:
            parent = tl.load(parents + number * parents_stride + token - begin).to(tl.int64)
            at = trail + number * trail_stride + parent * (HEADS * V * K) + cell
            # The state after the parent was stored by other threads of this program.
            tl.debug_barrier()
            state = tl.where(parent < 0, initial, tl.load(at, mask=inside & (parent >= 0)))
        query = tl.load(q + token * q_token + key_head * q_head + column, mask=wide, other=0.0)
        key = tl.load(k + token * k_token + key_head * k_head + column, mask=wide, other=0.0)
        value = tl.load(v + token * v_token + head * v_head + line, mask=high, other=0.0)
        at = a + token * a_token + head * a_head
        decay, strength = gates(
            at, b + token * b_token + head, a_log, dt_bias, head, column, wide, beta, threshold, K,
            BY_COLUMN,
        )  # fmt: skip
        query = normed(query.to(tl.float32), NORMALISED) * scale
        key = normed(key.to(tl.float32), NORMALISED)
        state *= decay[None, :] if BY_COLUMN else decay
        change = strength * (value.to(tl.float32) - tl.sum(state * key[None, :], 1))
        state += change[:, None] * key[None, :]
        o = tl.sum(state * query[None, :], 1)
        at = out + (token * HEADS + head) * V + line
        tl.store(at, o.to(out.dtype.element_ty), mask=high)
        if buffer is not None:
            at = buffer + row * buffer_stride + (token - begin) * (HEADS * V * K) + cell
            tl.store(at, state.to(buffer.dtype.element_ty), mask=inside & (row >= 0))
        if parents is not None:
            at = trail + number * trail_stride + (token - begin) * (HEADS * V * K) + cell
            tl.store(at, state, mask=inside)
    if UPDATE:
        tl.store(pool + target * (HEADS * V * K) + cell, state, mask=inside & (target >= 0))
    if (number + 1) * (HEADS * ((V + BLOCK_V - 1) // BLOCK_V)) >= tl.num_programs(0):
        clear(out + head * V + line, end, tokens, HEADS * V, high)
