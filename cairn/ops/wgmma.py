"""What the Gluon kernels for Hopper share: warp-group products (wgmma), TMA copies and barriers.

A warp group is four warps that multiply together; another warp issues the copies. Tiles are in
shared memory, [lines, columns] of 16-bit numbers; mbarriers in shared memory signal between them.
"""

from __future__ import annotations

from cairn.ops.gpu import gl, gluon, hopper


@gluon.jit
def copy(lines, place, arrived, tile):
    """Fill a tile from a table's line and column; `arrived` counts the bytes."""
    hopper.tma.async_copy_global_to_shared(lines, place, arrived, tile)


@gluon.jit
def clear(tile, first):
    """Zero the lines from `first` on: they are multiplied by 0, and may hold NaN."""
    LINES: gl.constexpr = tile.shape[0]
    PARTS: gl.constexpr = tile.shape[1] // 64
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, ROWS))
    for part in gl.static_range(PARTS):
        columns = tile.slice(part * 64, 64, dim=1)
        columns.store(gl.where((line < first)[:, None], columns.load(ROWS), 0.0))


@gluon.jit
def opaque_zero(count):
    """0, computed from a loop's counter so that the compiler does not know it.

    Added to the index of a tile, it keeps the tile's address inside the loop. Hoisted out of it,
    the addresses of all tiles would be kept in registers, or spilled, and the products would wait.
    """
    return count >> 30


@gluon.jit
def multiply(a, b, acc):
    """acc + a b, asynchronously."""
    return hopper.warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def base_of(best):
    """The maximum that exponents of a row are relative to; 0 if it is -inf."""
    return gl.where(best == float("-inf"), 0.0, best)


@gluon.jit
def for_rows(x, tile):
    """x [lines], laid out as the lines of a tile in registers."""
    ROWS: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    # Converting to the same layout crashes the compiler.
    if x.type.layout != ROWS:
        x = gl.convert_layout(x, ROWS)
    return x


@gluon.jit
def scaled(acc, scale):
    """Rows of acc times scale, in whatever layouts."""
    return acc * for_rows(scale, acc)[:, None]


@gluon.jit
def arrive(signal):
    """Arrive at a barrier once all threads of the warp group are here."""
    gl.thread_barrier()
    hopper.mbarrier.arrive(signal)


@gluon.jit
def summed(acc, free):
    """acc after its products are done; `free` is told that their tile may be overwritten."""
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    arrive(free)
    return acc
