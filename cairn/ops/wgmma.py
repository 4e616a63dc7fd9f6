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
    """Zeros from line `first` on: a weight of 0 times what is there may be NaN."""
    LINES: gl.constexpr = tile.shape[0]
    PARTS: gl.constexpr = tile.shape[1] // 64
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, ROWS))
    for part in gl.static_range(PARTS):
        columns = tile.slice(part * 64, 64, dim=1)
        columns.store(gl.where((line < first)[:, None], columns.load(ROWS), 0.0))


@gluon.jit
def unknown_zero(count):
    """0, from a loop's counter, but not known to the compiler.

    Where a tile lies that is numbered with it, is reckoned in every round, once for all threads. It
    would else be reckoned before the loop, for all tiles, and each thread would keep it, in memory
    if need be, from where products have to wait for it.
    """
    return count >> 30


@gluon.jit
def multiply(a, b, acc):
    """acc + a b, on its way."""
    return hopper.warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def base_of(best):
    """What a row's exponents are taken over, where it may have seen nothing."""
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
def tell(signal):
    """All threads of the group are here: who waits for the signal may go on."""
    gl.thread_barrier()
    hopper.mbarrier.arrive(signal)


@gluon.jit
def summed(acc, free):
    """acc, when its products are done; the tile that they read is free."""
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    tell(free)
    return acc
