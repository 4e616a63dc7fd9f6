"""Parts of rows that programs hold in registers: read once, stored once.

What is done with a part is done piece by piece: done with all of it at once, what lies between its
numbers and their sum would take as many registers as they do. A piece is of LINES lines of 4
numbers; a line of the part has as many of each piece.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.teams import load_inside, part_at
from cairn.ops.sampling.kernels.tuples import with_one_more


@triton.jit
def grouped(value, LINES: tl.constexpr):
    """[N] as [N / 4 / LINES, LINES, 4]: with as many lines as threads, each holds a line."""
    return tl.reshape(value, [value.shape[0] // (4 * LINES), LINES, 4])


@triton.jit
def sum_of_lines(value, LINES: tl.constexpr):
    """Of [N], the sums of its lines [LINES]."""
    return tl.sum(tl.sum(grouped(value, LINES), 2), 0)


@triton.jit
def load_pieces(x, begin, width, PART: tl.constexpr, PIECE: tl.constexpr, INSIDE: tl.constexpr):
    """Numbers of a row, whose begin-th lies at x, in pieces [PIECE] float32; 0 beyond the row.
    INSIDE: none is beyond it."""
    i = tl.arange(0, PIECE)
    pieces = ()
    for n in tl.static_range(PART // PIECE):
        at = n * PIECE
        piece = load_inside(x + at, i, begin + at, width, 0.0, PIECE, INSIDE)
        pieces = with_one_more(pieces, piece)
    return pieces


@triton.jit
def load_part(
    x, row, part, stride, width, PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr
):
    """A part of a row of float32 in pieces [PIECE], 0 beyond the row."""
    at, begin = part_at(row * stride, part, PART, ALIGN)
    # Where every load has a branch of its own, each waits for the one before.
    if (begin >= 0) & (begin + PART <= width):
        pieces = load_pieces(x + at, begin, width, PART, PIECE, True)
    else:
        pieces = load_pieces(x + at, begin, width, PART, PIECE, False)
    return pieces


@triton.jit
def store_piece(out, begin, width, value):
    """Write a row's numbers from the begin-th on, which lies at out."""
    i = tl.arange(0, value.shape[0])
    if (begin >= 0) & (begin + value.shape[0] <= width):
        tl.store(out + i, value)
    else:
        tl.store(out + i, value, mask=(i >= -begin) & (i < width - begin))


@triton.jit
def store_shares(
    out, row, part, width, pieces, least, total,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A part of a row of out = what is not below `least`, divided by total; else 0."""
    at, begin = part_at(row * width, part, PART, ALIGN)
    for n in tl.static_range(len(pieces)):
        share = tl.where(pieces[n] < least, 0.0, pieces[n]) / total
        store_piece(out + at + n * PIECE, begin + n * PIECE, width, share)
