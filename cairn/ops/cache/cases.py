"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.cache import quantized
from cairn.ops.cache.decode_slots import decode_slots
from cairn.ops.cache.resolve_frames import NOWHERE, resolve_frames
from cairn.ops.cache.write_kv import write_kv
from cairn.ops.testing import Arguments, Cases, Make

MAX_PAGES = 9


def _arguments(make: Make, num_rows: int, size: int, count: int, most: int) -> Arguments:
    """`count` of the rows decode; some of them fill their page."""
    max_pages = MAX_PAGES
    row = make.randint(0, 1, most) + num_rows
    row[:count] = make.rand(num_rows).argsort()[:count].sort().values
    first = make.randint(0, 1, most)
    first[:count] = make.randint(0, (size - 1) * max_pages, count)
    some = -(-count // 3)
    first[:some] = first[:some] // (size - 1) * (size - 1) + size - 2
    tables = make.randint(0, 99, 2 * num_rows + 1, max_pages, dtype=torch.int32)
    last_token = make.randint(0, 500, num_rows + 1)
    last_token[row[0]] = -1
    # Some table cells are written, among them those that the rows read; the others point at the
    # spare cell.
    cells = make.randint(0, 1, most) + tables.numel() - 1
    pages = make.randint(0, 1, most, dtype=torch.int32)
    own = row[:some] * max_pages + (first[:some] + first[:some] // (size - 1)) // size
    cells[:some], pages[:some] = own, make.randint(0, 99, some, dtype=torch.int32)
    return make.args(
        row,
        first,
        cells,
        pages,
        last_token,
        tables,
        True,
        size,
        500,
        99 * size + 1,
        99 * size + 2,
    )


def _with_guesses(make: Make, num_rows: int, size: int, drafts: int) -> Arguments:
    """Every row runs its last token or another one, followed by draft tokens."""
    args = list(_arguments(make, num_rows, size, num_rows, num_rows * (drafts + 1) + 3).args)
    row, count = args[0][:num_rows], drafts + 1
    first = args[1][:num_rows].clamp(max=(size - 1) * MAX_PAGES - count)
    begins = make.tensor([-1, -7] * num_rows, torch.int64)[:num_rows, None]
    given = make.full((len(args[0]),), -1, torch.int64)
    guesses = make.randint(0, 500, num_rows, drafts)
    given[: num_rows * count] = torch.cat((begins, guesses), 1).flatten()
    args[1][: num_rows * count] = (first[:, None] + make.arange(count)).flatten()
    args[0][: num_rows * count] = row.repeat_interleave(count)
    return make.args(*args, given)


@decode_slots.cases
def _(make: Make) -> Cases:
    yield _with_guesses(make, 1, 4, 8)
    yield _with_guesses(make, 5, 16, 3)
    for sizes in ((1, 4, 1, 2), (5, 4, 3, 16), (40, 16, 40, 80), (64, 64, 50, 128), (9, 2, 9, 18)):
        given = _arguments(make, *sizes)
        yield given
        for windowed, landmark_id in ((False, 500), (True, None), (False, None)):
            args = list(given.clone().args)
            args[6], args[8] = windowed, landmark_id
            yield make.args(*args)
    yield _arguments(make, 3, 4, 0, 16)


def frames_of(make: Make, shape: tuple[int, int, int], pages: int, frames: int) -> Arguments:
    """Some of the pages have frames; some frames name pages that they no longer hold."""
    tokens, heads, topk = shape
    rows = max(1, tokens // 2)
    table = torch.stack([make.rand(pages).argsort().int() for _ in range(rows)])
    indices = torch.stack(
        [make.rand(pages).argsort()[:topk].sort().values for _ in range(tokens * heads)]
    )
    indices = indices.view(tokens, heads, topk).int()
    indices[::3, :, topk // 2 :] = -1
    frame_of = make.full((heads, pages), NOWHERE, torch.int32)
    page_in = make.full((heads, frames), -1, torch.int32)
    held = min(pages, frames) * 2 // 3
    for head in range(heads):
        own, places = make.rand(pages).argsort()[:held], make.rand(frames).argsort()[:held]
        frame_of[head, own], page_in[head, places] = places.int(), own.int()
        frame_of[head, own[: held // 4]] = NOWHERE
    state = make.tensor([[frames - 2, 7, 5, 3]] * heads, torch.int64)
    used = make.randint(0, 7, heads, frames)
    row = make.randint(0, rows, tokens)
    return make.args(indices.contiguous(), row, table, frame_of, page_in, used, state)


@resolve_frames.cases
def _(make: Make) -> Cases:
    yield frames_of(make, (1, 2, 4), 30, 4)
    given = frames_of(make, (3, 3, 8), 40, 29)
    yield given
    yield make.args(*given.clone().args, make.tensor([3, -1, 39, 17, 4, 5], torch.int64))
    yield make.args(*frames_of(make, (3, 6, 4), 30, 13).args, layer_heads=2)
    yield frames_of(make, (70, 1, 16), 200, 1500)
    indices, row, *more = frames_of(make, (1, 2, 4), 30, 4).args
    yield make.args(indices[:0], row[:0], *more)


@write_kv.cases
def _(make: Make) -> Cases:
    for dtype, page_size, heads in ((torch.float32, 4, 3), (torch.bfloat16, 16, 1)):
        caches = [make.randn(5, heads, page_size, 8, dtype=dtype) for _ in range(2)]
        spot = make.tensor([0, 3, 17, -1, 2 * page_size, 5 * page_size - 1, -7], torch.int64)
        k, v = (make.randn(7, heads, 8, dtype=dtype) for _ in range(2))
        yield make.args(k, v, *caches, spot)
        yield make.args(k[:2], v[:2], *caches, spot[:2])
        yield make.args(k[:0], v[:0], *caches, spot[:0])
        yield make.args(k[3:4], v[3:4], *caches, spot[3:4])
        yield make.args(k, v, *(quantized.pack(cache) for cache in caches), spot)
