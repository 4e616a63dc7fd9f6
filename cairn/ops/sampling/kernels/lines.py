"""Parts of rows that no program holds: read once for the largest numbers of their lines, and where
these tell that something is kept, once more, from the cache.

A line is what a thread reads: EACH numbers side by side in each of DEPTH tiles [LINES, EACH] that
follow one another. A part has HELD times LINES lines; what is known of them is in tuples of HELD.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import ordered
from cairn.ops.sampling.kernels.teams import load_inside, told, total_of, units_of
from cairn.ops.sampling.kernels.tuples import with_one_more


@triton.jit
def tile_places(LINES: tl.constexpr, EACH: tl.constexpr):
    """Where the numbers of a tile lie in it, [LINES, EACH]."""
    return tl.arange(0, LINES)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def load_tile(
    x, begin, width, other, LINES: tl.constexpr, EACH: tl.constexpr, INSIDE: tl.constexpr
):
    """The tile at x as float32: numbers of a row from the begin-th on, `other` beyond the row.
    INSIDE: none is beyond it."""
    i = tile_places(LINES, EACH)
    return load_inside(x, i, begin, width, other, LINES * EACH, INSIDE).to(tl.float32)


@triton.jit
def largest_of(
    x, begin, width, other, INSIDE: tl.constexpr,
    HELD: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Of each thread's numbers in the tiles of a line the largest, HELD times [LINES, EACH], NaN
    above all. INSIDE: no number is beyond the row."""
    TILE: tl.constexpr = LINES * EACH
    largest = ()
    for h in tl.static_range(HELD):
        best = tl.full([LINES, EACH], float("-inf"), tl.float32)
        for d in tl.static_range(DEPTH):
            at = (h * DEPTH + d) * TILE
            tile = load_tile(x + at, begin + at, width, other, LINES, EACH, INSIDE)
            best = tl.maximum(best, tile, propagate_nan=tl.PropagateNan.ALL)
        largest = with_one_more(largest, best)
    return largest


@triton.jit
def survey_lines(
    x, begin, width, other,
    HELD: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The lines' maxima of a part, HELD times [LINES] float32, infinity for NaN; and `ordered` of
    the largest that each thread has, [LINES], where NaN is above all."""
    # Where every load has a branch of its own, each waits for the one before.
    if (begin >= 0) & (begin + HELD * DEPTH * LINES * EACH <= width):
        largest = largest_of(x, begin, width, other, True, HELD, DEPTH, LINES, EACH)
    else:
        largest = largest_of(x, begin, width, other, False, HELD, DEPTH, LINES, EACH)
    tops = ()
    odd = tl.zeros([LINES], tl.int32)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    for h in tl.static_range(HELD):
        unknown = largest[h] != largest[h]
        odd = tl.maximum(odd, tl.max(unknown.to(tl.int32), 1))
        top = tl.max(tl.where(unknown, float("inf"), largest[h]), 1)
        peak = tl.maximum(peak, top)
        tops = with_one_more(tops, top)
    return tops, tl.where(odd > 0, 0x7FFFFFFF, ordered(peak))


@triton.jit
def lines_from(tops, bound):
    """Lines that may have what reaches the bound: words [LINES] int32 of a bit for each of HELD."""
    word = tl.where(tops[0] < bound, 0, 1)
    for h in tl.static_range(1, len(tops)):
        word |= tl.where(tops[h] < bound, 0, 1 << h)
    return word


@triton.jit
def most_lines(word, HELD: tl.constexpr):
    """How many lines a thread has at most, of the words of `lines_from`."""
    count = word & 1
    for h in tl.static_range(1, HELD):
        count += (word >> h) & 1
    return tl.max(count, 0)


@triton.jit
def first_line(word, HELD: tl.constexpr):
    """Which of its lines a thread looks at next [LINES], the lowest bit of `lines_from`; and what
    is left after it."""
    held = tl.zeros(word.shape, tl.int32)
    for h in tl.static_range(1, HELD):
        held = tl.where(word & ((1 << h) - 1) == 0, h, held)
    return held, word & (word - 1)


@triton.jit
def load_line(
    x, held, live, begin, width, other,
    HELD: tl.constexpr, DEPTH: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The lines of a part at x that `first_line` names: DEPTH tiles, `other` beyond the row and
    where a thread is not `live`."""
    LINES: tl.constexpr = held.shape[0]
    i = tile_places(LINES, EACH) + (held * (DEPTH * LINES * EACH))[:, None]
    inside = (begin >= 0) & (begin + HELD * DEPTH * LINES * EACH <= width)
    tiles = ()
    for d in tl.static_range(DEPTH):
        place = i + d * (LINES * EACH)
        if inside:
            tile = tl.load(x + place, mask=live[:, None], other=other)
        else:
            own = live[:, None] & (place >= -begin) & (place < width - begin)
            tile = tl.load(x + place, mask=own, other=other)
        tiles = with_one_more(tiles, tile.to(tl.float32))
    return tiles


@triton.jit
def total_from(
    x, tops, least, peak, begin, width, row, part, parts, sums, arrivals, phase,
    PARTS: tl.constexpr, APART: tl.constexpr, HELD: tl.constexpr, DEPTH: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """`total_of` what all parts have from `least` >= 0 on; sums [parts] int64 is written."""
    one, two = units_of(peak)
    mass = tl.zeros(tops[0].shape, tl.int64)
    word = lines_from(tops, least)
    for _ in range(most_lines(word, HELD)):
        held, rest = first_line(word, HELD)
        tiles = load_line(x, held, word != 0, begin, width, 0.0, HELD, DEPTH, EACH)
        for d in tl.static_range(DEPTH):
            kept = tl.where(tiles[d] >= least, tiles[d], 0.0)
            mass += tl.sum((kept * one * two).to(tl.int64), 1)
        word = rest
    own = tl.sum(mass, 0)
    all_sums = told(sums, part, own, parts, 0, arrivals, row, (phase + 1) * parts, PARTS, APART)
    return total_of(tl.sum(all_sums, 0), peak)


@triton.jit
def store_tile(out, i, live, begin, width, inside, value):
    """Write a tile's numbers to places i of a part that begins at out."""
    value = value.to(out.dtype.element_ty)
    if inside:
        tl.store(out + i, value, mask=live[:, None])
    else:
        tl.store(out + i, value, mask=live[:, None] & (i >= -begin) & (i < width - begin))


@triton.jit
def store_kept(
    x, out, tops, least, total, every, begin, width,
    DEPTH: tl.constexpr, EACH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """A part of out = x where it is at least `least` or, without SHARES, if `every`; the others are
    -inf. SHARES: x divided by total where it is not below `least`, the others 0."""
    HELD: tl.constexpr = len(tops)
    LINES: tl.constexpr = tops[0].shape[0]
    NOTHING: tl.constexpr = 0.0 if SHARES else float("-inf")
    i = tile_places(LINES, EACH)
    inside = (begin >= 0) & (begin + HELD * DEPTH * LINES * EACH <= width)
    word = lines_from(tops, least)
    none = tl.full([LINES, EACH], NOTHING, tl.float32)
    for n in tl.static_range(HELD * DEPTH):
        bare = ((word >> (n // DEPTH)) & 1) == 0
        store_tile(out, i + n * (LINES * EACH), bare, begin, width, inside, none)
    for _ in range(most_lines(word, HELD)):
        held, rest = first_line(word, HELD)
        live = word != 0
        tiles = load_line(x, held, live, begin, width, NOTHING, HELD, DEPTH, EACH)
        for d in tl.static_range(DEPTH):
            if SHARES:
                value = tl.where(tiles[d] < least, 0.0, tiles[d]) / total
            else:
                # NaN reaches nothing.
                value = tl.where((tiles[d] >= least) | every, tiles[d], NOTHING)
            place = i + ((held * DEPTH + d) * (LINES * EACH))[:, None]
            store_tile(out, place, live, begin, width, inside, value)
        word = rest
