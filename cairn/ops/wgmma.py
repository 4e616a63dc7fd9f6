"""Helpers of the Gluon kernels for Hopper: warp-group products (wgmma), TMA copies and mbarriers.

Warp groups of four warps multiply tiles; a producer warp issues the TMA copies. Tiles are [lines,
columns] of 16-bit elements in shared memory, and mbarriers signal between producer and consumers.
"""

from __future__ import annotations

from cairn.ops.gpu import gl, gluon, hopper


@gluon.jit
def copy(descriptor, coordinates, barrier, tile):
    """TMA copy of the block at [line, column] into a tile; the mbarrier counts the bytes."""
    hopper.tma.async_copy_global_to_shared(descriptor, coordinates, barrier, tile)


@gluon.jit
def clear(tile, first):
    """Zero the lines of a tile from `first` on, which may contain NaN: 0 * NaN would be NaN."""
    LINES: gl.constexpr = tile.shape[0]
    PARTS: gl.constexpr = tile.shape[1] // 64
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, ROWS))
    for part in gl.static_range(PARTS):
        columns = tile.slice(part * 64, 64, dim=1)
        columns.store(gl.where((line < first)[:, None], columns.load(ROWS), 0.0))


@gluon.jit
def opaque_zero(count):
    """0, computed from a loop counter in a way that the compiler cannot simplify.

    Added to the index of a tile, it keeps the compiler from hoisting the address computation out of
    the loop: the addresses of all tiles would occupy registers or spill, and stall the products.
    """
    return count >> 30


@gluon.jit
def multiply(a, b, acc):
    """acc + a @ b, asynchronously."""
    return hopper.warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def base_of(best):
    """The value subtracted from the logits of a row before exp2: their maximum, or 0 if that is
    -inf."""
    return gl.where(best == float("-inf"), 0.0, best)


@gluon.jit
def for_rows(x, tile):
    """x [lines] in the layout of the lines of a register tile."""
    ROWS: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    # Converting to the same layout crashes the compiler.
    if x.type.layout != ROWS:
        x = gl.convert_layout(x, ROWS)
    return x


@gluon.jit
def scaled(acc, scale):
    """acc [lines, columns] times scale [lines], which may have different layouts."""
    return acc * for_rows(scale, acc)[:, None]


@gluon.jit
def arrive(barrier):
    """Arrive at an mbarrier after all threads of the warp group have reached this point."""
    gl.thread_barrier()
    hopper.mbarrier.arrive(barrier)


@gluon.jit
def summed(acc, free):
    """acc after its products have finished; arrives at `free`, so the tile may be overwritten."""
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    arrive(free)
    return acc
