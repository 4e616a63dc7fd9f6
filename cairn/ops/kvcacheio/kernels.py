"""Kernels of transfers: copies of 8-byte words."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def buffer_of(given, layer, TABLE: tl.constexpr):
    """A buffer, or the one whose address is a layer's entry of a table."""
    if TABLE:
        return tl.load(given + layer).to(tl.pointer_type(tl.int64))
    return given.to(tl.pointer_type(tl.int64))


@triton.jit
def words_at(index, run, layer, page_size, page_step, slot_step, layer_step, run_step):
    """Offset of the runs of the tokens at index, see `Layout.steps`."""
    page = (index // page_size) * page_step + (index % page_size) * slot_step
    return page + layer * layer_step + run * run_step


@triton.jit
def copy_kernel(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, lines, runs, words, first_layer,
    src_size, src_page, src_slot, src_layer, src_run,
    dst_size, dst_page, dst_slot, dst_layer, dst_run,
    SRC_TABLE: tl.constexpr, DST_TABLE: tl.constexpr, T: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """T runs of words in one layer, of keys or (program_id(2) = 1) of values.

    A line is a run of a token: line // runs is the token. All sizes are in words.
    """
    line = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    layer = tl.program_id(1) + first_layer
    alive = line < lines
    token, run = line // runs, line % runs
    source = tl.load(src_indices + token, mask=alive, other=0)
    target = tl.load(dst_indices + token, mask=alive, other=0)
    # A negative slot is padding.
    alive = alive & (source >= 0) & (target >= 0)
    src = buffer_of(src_k, layer, SRC_TABLE)
    dst = buffer_of(dst_k, layer, DST_TABLE)
    if src_v is not None:
        of_values = tl.program_id(2) == 1
        if of_values:
            src = buffer_of(src_v, layer, SRC_TABLE)
            dst = buffer_of(dst_v, layer, DST_TABLE)
    read = words_at(source, run, layer, src_size, src_page, src_slot, src_layer, src_run)
    write = words_at(target, run, layer, dst_size, dst_page, dst_slot, dst_layer, dst_run)
    for begin in range(0, words, WP):
        column = begin + tl.arange(0, WP)
        inside = alive[:, None] & (column < words)[None, :]
        word = tl.load(src + read[:, None] + column[None, :], mask=inside)
        tl.store(dst + write[:, None] + column[None, :], word, mask=inside)


@triton.jit
def ring_read_kernel(
    target, ring, count, entries, words, width, target_line, ring_entry, ring_line,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program copies the next entry and advances the count. PDL: as in `launch_next`."""
    launch_next(PDL)
    taken = tl.load(count)
    source = ring + (taken % entries) * ring_entry
    for begin in range(0, words, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        line, column = at // width, at % width
        # Volatile: the host has written since this address was last read.
        read = source + line * ring_line + column
        word = tl.load(read, mask=at < words, cache_modifier=".cv")
        tl.store(target + line * target_line + column, word, mask=at < words)
    # Every thread has loaded the count before it is changed.
    tl.debug_barrier()
    tl.store(count, taken + 1)


@triton.jit(early=())
def ring_write_kernel(
    values, ring, count, kept, place, entries, width, numbers,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program writes the entry of the last read; kept and place may be None. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    at = tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < numbers)
    entry = (tl.load(count) - 1) % entries
    tl.store(ring + entry * width + at, value, mask=at < numbers)
    if kept is not None:
        own = tl.load(place + at, mask=at < numbers, other=0)
        tl.store(kept + own, value, mask=at < numbers)
