"""Kernels of collectives through peer-to-peer memory.

An 8-byte word holds 4 bytes of payload and, as its flag, the number of the exchange. 8-byte stores
are atomic, so a reader polls a word until the flag is right and then has the payload: no barrier
and no fence (NCCL's LL protocol).
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid_barrier import arrive
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def write_words(at, word):
    """Store 8-byte words atomically, visible to other devices."""
    tl.inline_asm_elementwise(
        "st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [at, word], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read_words(at):
    """Load 8-byte words that another device may be writing."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", [at], tl.int64, is_pure=False, pack=1
    )


@triton.jit
def values_of(words, like):
    """4-byte words as float32 values, one or two a word, of the dtype that `like` points to."""
    kind = like.dtype.element_ty
    if kind.primitive_bitwidth == 16:
        low = (words & 0xFFFF).to(tl.int16).to(kind, bitcast=True)
        high = (words >> 16).to(tl.int16).to(kind, bitcast=True)
        values = tl.interleave(low, high)
    else:
        values = words.to(kind, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def send(own, at, begin, epoch, addresses, capacity, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Send 4-byte words to the other ranks, see `exchanged`. Returns the index of the first word of
    this exchange's inboxes."""
    word = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    begin += (epoch & 1).to(tl.int64) * RANKS * capacity
    for other in tl.static_range(RANKS):
        if other != RANK:
            to = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
            write_words(to + begin + RANK * capacity + at, word)
    return begin


@triton.jit
def receive(source, epoch):
    """The words that a rank has sent in this exchange; waits for them."""
    got = read_words(source)
    while tl.min(((got >> 32).to(tl.int32) == epoch).to(tl.int32), 0) == 0:
        got = read_words(source)
    return got.to(tl.int32)


@triton.jit
def exchanged(
    own, at, begin, epoch, inbox, addresses, capacity, like,
    RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """All-reduce of 4-byte words: float32 sums in rank order.

    Args:
        own: this rank's words.
        at: their indices in an inbox.
        begin: index of the first of [2, RANKS, capacity] words of these inboxes.
        epoch: number of the exchange.
        inbox: int64, this rank's memory, written by the others.
        addresses: [RANKS] int64, addresses of every rank's memory.
        like: pointer to the dtype of the payload.
    """
    begin = send(own, at, begin, epoch, addresses, capacity, RANK, RANKS)
    total = values_of(tl.zeros_like(own), like)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += values_of(own, like)
        else:
            got = receive(inbox + begin + rank * capacity + at, epoch)
            total += values_of(got, like)
    return total


@triton.jit(early=())
def sum_words_kernel(
    x, out, inbox, addresses, epochs, words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum of x over the ranks, with ADD out += that sum; see `exchanged`.

    Program p owns words p * BLOCK .. of the inboxes and counts its exchanges. Even and odd
    exchanges have separate inboxes. That is enough: a rank starts exchange n + 2 after it has
    received n + 1 from every rank, which these sent after they had read exchange n.

    Args:
        x: [words] int32, the payload.
        out: NUMBERS values a word.
        epochs: [programs] int32, exchanges so far.
        PDL: as in `await_previous`.
    """
    launch_next(PDL)
    await_previous(PDL)
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    at = tl.minimum(program * BLOCK + tl.arange(0, BLOCK), words - 1)
    own = tl.load(x + at)
    total = exchanged(own, at, 0, epoch, inbox, addresses, capacity, out, RANK, RANKS)
    column = program * (BLOCK * NUMBERS) + tl.arange(0, BLOCK * NUMBERS)
    inside = column < words * NUMBERS
    if ADD:
        total += tl.load(out + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=inside)
    tl.store(epochs + program, epoch)


@triton.jit(early=())
def gather_words_kernel(
    x, out, inbox, addresses, epochs, words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = x of rank r, in the inboxes and with the epochs of `sum_words_kernel`.

    Args:
        x: [words] int32.
        out: [RANKS, words] int32.
        epochs, PDL: as in `sum_words_kernel`.
    """
    launch_next(PDL)
    await_previous(PDL)
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    column = program * BLOCK + tl.arange(0, BLOCK)
    at = tl.minimum(column, words - 1)
    own = tl.load(x + at)
    begin = send(own, at, 0, epoch, addresses, capacity, RANK, RANKS)
    for rank in tl.static_range(RANKS):
        got = own
        if rank != RANK:
            got = receive(inbox + begin + rank * capacity + at, epoch)
        tl.store(out + rank * words + column, got, mask=column < words)
    tl.store(epochs + program, epoch)


@triton.jit(early=("weight",))
def add_normed_words_kernel(
    x, residual, weight, inbox, addresses, epochs, begin, row_words, capacity, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
    STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual[row] += rmsnorm(sum of x[row] over the ranks); one program a row.

    Args:
        x: [rows, row_words] words.
        residual: [rows, NUMBERS * row_words].
        weight: [NUMBERS * row_words], of the norm.
        epochs: [rows] int32, as in `sum_words_kernel`.
        begin: as in `exchanged`.
        STRIDE: inbox words of a program; the same for all widths, so that none shares them.
        PDL: as in `await_previous`.
    """
    launch_next(PDL)
    row, width = tl.program_id(0), row_words * NUMBERS
    column = tl.arange(0, BLOCK * NUMBERS)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    epoch = tl.load(epochs + row) + 1
    at = tl.minimum(tl.arange(0, BLOCK), row_words - 1)
    own = tl.load(x + row * row_words + at)
    before = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    place = row * STRIDE + at
    total = exchanged(own, place, begin, epoch, inbox, addresses, capacity, residual, RANK, RANKS)
    total = tl.where(inside, total, 0.0)
    scale = tl.rsqrt(tl.sum(total * total, 0) / width + eps)
    total = before + total * scale * factor
    tl.store(residual + row * width + column, total.to(residual.dtype.element_ty), mask=inside)
    tl.store(epochs + row, epoch)


@triton.jit
def await_count(at, wanted):
    """Poll a flag that another device writes until it is `wanted`; then acquire."""
    here = tl.load(at, volatile=True)
    while here != wanted:
        here = tl.load(at, volatile=True)
    tl.atomic_add(at, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def await_free_kernel(freed, sent):
    """Wait until the peer has read every chunk of this slot."""
    await_count(freed, tl.load(sent))


@triton.jit
def announce_kernel(sent, address):
    """Increment the peer's flag at `address`: one more chunk has been written."""
    count = tl.load(sent) + 1
    tl.store(sent, count)
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), count, sem="release", scope="sys")


@triton.jit
def add_received_kernel(
    residual, first, second, weight, ready, taken, arrived, freed, width, eps,
    BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """residual += first + second, with NORMED rmsnorm of that; one program a row.

    Args:
        residual, first, second: [rows, width], contiguous; the peer writes one of the addends.
        weight: [width], of the norm.
        ready, taken, arrived: as in `peers._Slot`.
        freed: address of the peer's flag.
    """
    wanted = tl.load(taken) + 1
    await_count(ready, wanted)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    total = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        total *= tl.rsqrt(tl.sum(total * total, 0) / width + eps) * factor
    total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + at, total.to(residual.dtype.element_ty), mask=inside)
    if arrive(arrived) == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        tl.store(taken, wanted)
        tl.atomic_xchg(freed.to(tl.pointer_type(tl.int32)), wanted, sem="release", scope="sys")
