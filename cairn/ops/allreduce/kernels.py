"""Kernels that write to and read from memory of other ranks of the host.

Words of 8 bytes carry 4 bytes of numbers and the number of the exchange that they belong to: who
waits for numbers reads the word until it has the right number. So neither a barrier nor a fence is
needed (as in NCCL's LL protocol).
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid_barrier import arrive
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def write_words(at, word):
    """Store words of 8 bytes, each as a whole, where another device may read them."""
    tl.inline_asm_elementwise(
        "st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [at, word], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read_words(at):
    """Load words of 8 bytes, each as a whole, which another device may write meanwhile."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", [at], tl.int64, is_pure=False, pack=1
    )


@triton.jit
def numbers_of(words, like):
    """The numbers of `like`'s dtype in words of 4 bytes, in float32, in their order."""
    kind = like.dtype.element_ty
    if kind.primitive_bitwidth == 16:
        low = (words & 0xFFFF).to(tl.int16).to(kind, bitcast=True)
        high = (words >> 16).to(tl.int16).to(kind, bitcast=True)
        numbers = tl.interleave(low, high)
    else:
        numbers = words.to(kind, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def exchanged(
    own, at, begin, epoch, inbox, addresses, capacity, like,
    RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Send words to all ranks, and give the sum of what all have sent: float32, in their order.

    Args:
        own: words of 4 bytes.
        at: where they stand in an inbox of `capacity` words.
        begin: of this exchange's inboxes.
        epoch: number of the exchange.
        inbox: [2, RANKS, capacity] int64, what the ranks have written to this one.
        addresses: [RANKS] int64, of their inboxes.
        like: pointer to numbers of their dtype.
    """
    word = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    begin += (epoch & 1).to(tl.int64) * RANKS * capacity
    for other in tl.static_range(RANKS):
        if other != RANK:
            to = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
            write_words(to + begin + RANK * capacity + at, word)
    total = numbers_of(tl.zeros_like(own), like)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += numbers_of(own, like)
        else:
            source = inbox + begin + rank * capacity + at
            got = read_words(source)
            while tl.min(((got >> 32).to(tl.int32) == epoch).to(tl.int32), 0) == 0:
                got = read_words(source)
            total += numbers_of(got.to(tl.int32), like)
    return total


@triton.jit(early=())
def sum_words_kernel(
    x, out, inbox, addresses, epochs, words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = the sum of the ranks' x, or out += it with ADD; see `exchanged`.

    Program p exchanges words p * BLOCK .. and counts its exchanges. Of two exchanges in turn each
    has an inbox of its own: a rank that writes the next but one has read all of the one before,
    for which every rank must have been done with this one.

    Args:
        x: the numbers as words of 4 bytes.
        out: where the sum goes, NUMBERS a word.
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


@triton.jit(early=("weight",))
def add_normed_words_kernel(
    x, residual, weight, inbox, addresses, epochs, begin, row_words, capacity, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
    STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual[row] += rmsnorm(the sum of the ranks' x[row]); a program takes a row.

    Args:
        x: [rows, row_words] words.
        residual: [rows, NUMBERS * row_words].
        weight: [NUMBERS * row_words], of the norm.
        epochs: [rows] int32, as in `sum_words_kernel`.
        begin: of the inboxes of rows.
        STRIDE: words from row to row in an inbox, whatever the width: each program has its own.
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
    """Wait until another device has written `wanted`; what it wrote before is visible then."""
    here = tl.load(at, volatile=True)
    while here != wanted:
        here = tl.load(at, volatile=True)
    tl.atomic_add(at, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def await_free_kernel(freed, sent):
    """Wait until the peer has read all that was sent to it."""
    await_count(freed, tl.load(sent))


@triton.jit
def announce_kernel(sent, address):
    """Tell the peer, at an address of its memory, that one more part was sent."""
    count = tl.load(sent) + 1
    tl.store(sent, count)
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), count, sem="release", scope="sys")


@triton.jit
def add_received_kernel(
    residual, first, second, weight, ready, taken, arrived, freed, width, eps,
    BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """residual += first + second, one of which the peer sends, or their norm; a program a row.

    Args:
        residual, first, second: [rows, width], contiguous.
        weight: [width], of the norm, with NORMED.
        ready: how many parts the peer has sent so far.
        taken: how many were read so far.
        arrived: a counter of `grid_barrier`.
        freed: address in the peer's memory of the number of parts that this rank has read.
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
