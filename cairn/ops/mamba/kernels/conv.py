"""Kernels of the short causal convolution. Inputs before a sequence's first token come from its
state, or are zeros; taps are summed in float32, the oldest first."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous


@triton.jit
def sequence_of(token, starts, count, STEPS: tl.constexpr):
    """By bisection, the last sequence that begins at or before a token; `STEPS` halvings suffice
    for `count` sequences."""
    found = token * 0
    for i in tl.static_range(STEPS):
        next_one = found + (1 << (STEPS - 1 - i))
        begin = tl.load(starts + next_one, mask=next_one < count, other=0)
        found = tl.where((next_one < count) & (begin <= token), next_one, found)
    return found


@triton.jit
def following(token, starts, number, count):
    """The sequence of a token that is in sequence `number` or behind it."""
    while (number + 1 < count) & (tl.load(starts + number + 1).to(tl.int32) <= token):
        number += 1
    return number


@triton.jit
def activated(y, SILU: tl.constexpr):
    """silu(y), or y."""
    return y / (1 + tl.exp(-y)) if SILU else y


@triton.jit
def past(states, slot, used, channel, column, stride, channel_stride, inside):
    """Inputs in a column of the states; 0 for sequences without an initial state."""
    at = states + slot * stride + channel * channel_stride + column
    return tl.load(at, mask=inside & used, other=0.0).to(tl.float32)


@triton.jit
def taps_of(weight, channel, inside, channel_stride, tap_stride, WIDTH: tl.constexpr):
    """The weights of a block of channels, a vector for each tap."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        at = weight + channel * channel_stride + tap * tap_stride
        own = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        taps = taps + (own,)  # type: ignore[assignment]  # noqa: RUF005
    return taps


@triton.jit
def conv_tokens_kernel(
    x, weight, bias, states, starts, slots, has_initial_state, out, tokens, channels, count, length,
    x_token, x_channel, out_token, out_channel, weight_channel, weight_tap,
    state_stride, state_channel, SIZE: tl.constexpr, WIDTH: tl.constexpr, SKIPPED: tl.constexpr,
    SILU: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Outputs of TOKENS tokens, one after the other, in CHANNELS channels; 0 after the last
    sequence.

    starts: [count + 1], or None: sequences have `length` tokens. SIZE: columns of a state. SKIPPED:
    slot of padding sequences, whose inputs are returned unchanged; None: no padding.
    """
    row, part = row_and_part(PROGRAMS)
    inside = part * CHANNELS + tl.arange(0, CHANNELS) < channels
    # Offsets inside a program's block fit in 32 bits.
    channel, before = tl.arange(0, CHANNELS), part.to(tl.int64) * CHANNELS
    weight += before * weight_channel
    weights = taps_of(weight, channel, inside, weight_channel, weight_tap, WIDTH)
    shift = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        shift += tl.load(bias + before + channel, mask=inside, other=0.0).to(tl.float32)
    x += row * TOKENS * x_token + before * x_channel
    out += row * TOKENS * out_token + before * out_channel
    if states is not None:
        states += before * state_channel
    has_state: tl.constexpr = states is not None and has_initial_state is not None
    first = (row * TOKENS).to(tl.int32)
    all_end = count * length if starts is None else tl.load(starts + count).to(tl.int32)
    number = first * 0 if starts is None else sequence_of(first, starts, count, STEPS)
    for i in range(tl.minimum(TOKENS, tokens - first)):
        token, y = first + i, shift
        if token < all_end:
            if starts is None:
                number = token // length
                begin = number * length
            else:
                number = following(token, starts, number, count)
                begin = tl.load(starts + number).to(tl.int32)
            slot = number.to(tl.int64)
            if slots is not None:
                slot = tl.load(slots + number).to(tl.int64)
            for tap in tl.static_range(WIDTH):
                back = WIDTH - 1 - tap
                source = token - back
                at = x + (i - back) * x_token + channel * x_channel
                value = tl.load(at, mask=inside & (source >= begin), other=0.0).to(tl.float32)
                if has_state and tap < WIDTH - 1:  # noqa: SIM102 - `source` is known late
                    if source < begin:
                        used = (slot >= 0) & tl.load(has_initial_state + number).to(tl.int1)
                        value += past(
                            states, slot, used, channel, SIZE + source - begin, state_stride,
                            state_channel, inside,
                        )  # fmt: skip
                y += weights[tap] * value
            y = activated(y, SILU)
            if SKIPPED is not None:
                at = x + i * x_token + channel * x_channel
                same = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                y = tl.where(slot == SKIPPED, same, y)
        else:
            y = tl.zeros((CHANNELS,), tl.float32)
        at = out + i * out_token + channel * out_channel
        tl.store(at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolve_back(
    x, weight, bias, states, slot, used, ring, before, out, channel, inside, live, length,
    x_token, x_channel, out_token, out_channel, weight_channel, weight_tap,
    state_stride, state_channel, SIZE: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Outputs of one sequence, the last one first; arguments as in `conv_sequences_kernel`."""
    for i in range(length):
        token = length - 1 - i
        y = tl.zeros(channel.shape, dtype=tl.float32)
        if bias is not None:
            y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1 - tap)
            at = x + source.to(tl.int64) * x_token + channel * x_channel
            value = tl.load(at, mask=inside & (source >= 0), other=0.0).to(tl.float32)
            if tap < WIDTH - 1:
                if ring is None:
                    place = SIZE + source
                else:
                    place = ((before + source) % SIZE + SIZE) % SIZE
                value += past(
                    states, slot, used, channel, place, state_stride, state_channel,
                    inside & (source < 0),
                )  # fmt: skip
            at = weight + channel * weight_channel + tap * weight_tap
            y += tl.load(at, mask=inside, other=0.0).to(tl.float32) * value
        # All threads have loaded this token before it is overwritten.
        tl.debug_barrier()
        at = out + token.to(tl.int64) * out_token + channel * out_channel
        tl.store(at, activated(y, SILU).to(out.dtype.element_ty), mask=live)


@triton.jit(early=())
def conv_sequences_kernel(
    x, weight, bias, states, starts, slots, stored, has_initial_state, ring, out, channels,
    tokens, length, x_token, x_channel, x_batch, out_token, out_channel, out_batch,
    weight_channel, weight_tap, state_stride, state_channel,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SKIPPED: tl.constexpr,
    SILU: tl.constexpr, CONVOLVE: tl.constexpr, UPDATE: tl.constexpr, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence in CHANNELS channels, its last token first, so that `out` may be `x`: outputs if
    CONVOLVE, then the state if UPDATE.

    starts: [N + 1], or None: sequence n is x[n] with `length` tokens. ring: [N], tokens before
    these, of states that are rings; None: states are shifted. stored: slots of the states behind
    the tokens, or None: `slots`. has_initial_state None: all have a state.
    tokens: of all; those behind the last sequence get 0. PDL: as in `await_previous`.
    """
    await_previous(PDL)
    number, part = row_and_part(PROGRAMS)
    channel = part * CHANNELS + tl.arange(0, CHANNELS).to(tl.int64)
    inside = channel < channels
    if starts is not None:
        begin = tl.load(starts + number).to(tl.int64)
        rest = (tokens - begin).to(tl.int32)
        length = (tl.load(starts + number + 1) - begin).to(tl.int32)
        x += begin * x_token
        out += begin * out_token
    else:
        rest = length
        x += number * x_batch
        out += number * out_batch
    slot = number if slots is None else tl.load(slots + number).to(tl.int64)
    used = slot >= 0
    if has_initial_state is not None:
        used = used & tl.load(has_initial_state + number).to(tl.int1)
    before = 0 if ring is None else tl.load(ring + number)
    live = inside
    if SKIPPED is not None:
        live = inside & (slot != SKIPPED)
    target = slot if stored is None else tl.load(stored + number).to(tl.int64)
    state = states + slot * state_stride + channel[:, None] * state_channel
    column = tl.arange(0, COLUMNS)
    if UPDATE:
        if ring is None:
            moved, kept = length - SIZE + column, tl.full((COLUMNS,), True, tl.int1)
            old = moved + SIZE
        else:
            moved = ((column - before) % SIZE + SIZE) % SIZE
            kept, old = moved < length, column
        wanted = live[:, None] & (column < SIZE)[None, :] & (target >= 0)
        fresh = (moved >= 0)[None, :] & (moved < length)[None, :]
        last = x + channel[:, None] * x_channel + moved.to(tl.int64)[None, :] * x_token
        after = tl.load(last, mask=wanted & fresh, other=0.0).to(tl.float32)
        after += tl.load(state + old[None, :], mask=wanted & ~fresh & used, other=0.0).to(
            tl.float32
        )
    if CONVOLVE:
        convolve_back(
            x, weight, bias, states, slot, used, ring, before, out, channel, inside, live, length,
            x_token, x_channel, out_token, out_channel, weight_channel, weight_tap, state_stride,
            state_channel, SIZE, WIDTH, SILU,
        )  # fmt: skip
    if UPDATE:
        tl.debug_barrier()
        state = states + target * state_stride + channel[:, None] * state_channel
        tl.store(
            state + column[None, :], after.to(states.dtype.element_ty), mask=wanted & kept[None, :]
        )
    if CONVOLVE and number == tl.num_programs(0) // PROGRAMS - 1:
        for i in range(length, rest):
            at = out + (tl.zeros_like(channel) + i) * out_token + channel * out_channel
            tl.store(at, tl.zeros(channel.shape, out.dtype.element_ty), mask=inside)
