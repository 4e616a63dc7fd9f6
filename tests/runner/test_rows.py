"""The batch of a step, compared with brute-force insertion of landmarks."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cache.landmarks import SlotMap
from cairn.runner.rows import Rows
from cairn.runner.step import DecodeWork, PageGrant, RowWork, StepPlan

LANDMARK = 999


def laid_out(tokens: list[int], size: int, landmarks: bool) -> list[tuple[int, int]]:
    """(id, position) of every slot: a landmark is inserted when a page lacks only its last slot."""
    slots: list[tuple[int, int]] = []
    for number, token in enumerate(tokens):
        slots.append((token, number))
        if landmarks and len(slots) % size == size - 1:
            slots.append((LANDMARK, number + 1))
    return slots


def make_rows(size: int, landmarks: bool, num_rows: int = 4, max_pages: int = 40) -> Rows:
    return Rows(num_rows, max_pages, SlotMap(size, landmarks), LANDMARK, torch.device("cpu"))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([2, 3, 4, 16]),
    landmarks=st.booleans(),
    num_rows=st.integers(1, 4),
)
def test_every_step_runs_the_next_slots_of_each_row(seed, size, landmarks, num_rows):
    """Random prefill chunks and decodes: the content of each slot, its page, and the pages
    completed."""
    rng = random.Random(seed)
    rows = make_rows(size, landmarks, num_rows)
    # With as many steps, no row has more than 40 pages.
    tokens = [[rng.randrange(900) for _ in range(rng.randint(1, 28))] for _ in range(num_rows)]
    pages = list(range(num_rows * 40))
    rng.shuffle(pages)
    mine: list[list[int]] = [pages[40 * r : 40 * r + 40] for r in range(num_rows)]
    granted, done = [0] * num_rows, [0] * num_rows
    for step in range(12):
        works, decode, grants, expected = [], [], [], []
        chosen = rng.sample(range(num_rows), rng.randint(1, num_rows))
        for r in sorted(chosen, key=lambda r: done[r] < len(tokens[r])):
            left = len(tokens[r]) - done[r]
            if left:
                part = tokens[r][done[r] : done[r] + rng.randint(1, left)]
                works.append(RowWork(r, done[r], part, sample=False))
            else:
                part = [rng.randrange(900)]
                tokens[r] += part
                remember(rows, r, part[0])
                decode.append((r, done[r]))
            before = len(laid_out(tokens[r][: done[r]], size, landmarks))
            done[r] += len(part)
            after = laid_out(tokens[r][: done[r]], size, landmarks)
            need = -(-len(after) // size)
            if need > granted[r]:
                grants.append(PageGrant(r, granted[r], tuple(mine[r][granted[r] : need])))
                granted[r] = need
            expected += [(r, s, *after[s]) for s in range(before, len(after))]
        plan = StepPlan(step, (), (), tuple(grants), tuple(works), decoding(*decode))
        layout = rows.lay_out(plan)
        check_batch(layout, rows.batch(layout), expected, mine, size)


def decoding(*rows: tuple[int, int]) -> DecodeWork:
    """(row, tokens that have run) of each."""
    return DecodeWork.of([row for row, _ in rows], [done for _, done in rows], [0] * len(rows))


def remember(rows: Rows, row: int, token: int) -> None:
    rows.remember(torch.tensor([row]), torch.tensor([token]))


def batch_of(rows, plan):
    return rows.batch(rows.lay_out(plan))


def check_batch(layout, batch, expected, pages, size) -> None:
    """All tensors of the batch, compared with (row, slot, id, position) of each slot in order."""
    row, slot, ids, positions = (list(column) for column in zip(*expected, strict=True))
    assert batch.row.tolist() == row
    assert batch.slot.tolist() == slot == layout.slot.tolist()
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    physical = [pages[r][s // size] for r, s in zip(row, slot, strict=True)]
    places = [p * size + s % size for p, s in zip(physical, slot, strict=True)]
    (place,) = batch.places
    assert place.location.tolist() == places
    assert batch.completed.tolist() == [i for i, s in enumerate(slot) if s % size == size - 1]
    assert batch.completed_pages.tolist() == [physical[i] for i in batch.completed.tolist()]
    assert batch.max_slot == max(slot)
    starts = [i for i in range(len(row)) if i == 0 or row[i] != row[i - 1]]
    assert layout.start.tolist() == starts
    ends = [*starts[1:], len(row)]
    segments = [(row[i], slot[i], end - i) for i, end in zip(starts, ends, strict=True)]
    assert layout.rows.segments == [number for stretch in segments for number in stretch]
    for r in set(row):
        last = max(s for q, s in zip(row, slot, strict=True) if q == r) // size
        assert place.page_table[r, : last + 1].tolist() == pages[r][: last + 1]


def test_shapes_and_dtypes():
    rows = make_rows(4, landmarks=True)
    plan = StepPlan(
        0,
        (),
        (),
        (PageGrant(2, 0, (7,)), PageGrant(0, 0, (3, 5))),
        (RowWork(2, 0, [11, 12, 13], sample=True), RowWork(0, 0, [21, 22, 23, 24], sample=True)),
    )
    batch = batch_of(rows, plan)
    assert batch.input_ids.tolist() == [11, 12, 13, LANDMARK, 21, 22, 23, LANDMARK, 24]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 3]
    (place,) = batch.places
    assert place.location.tolist() == [28, 29, 30, 31, 12, 13, 14, 15, 20]
    assert batch.completed.tolist() == [3, 7]
    assert batch.completed_pages.tolist() == [7, 3]
    assert place.page_table.dtype == torch.int32
    for tensor in (batch.input_ids, batch.positions, batch.row, batch.slot, place.location):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (9,)
    assert batch.completed.dtype == batch.completed_pages.dtype == torch.int64


def test_the_token_that_fills_a_page_brings_its_landmark():
    rows = make_rows(4, landmarks=True)
    grants = (PageGrant(1, 0, (6, 9)),)
    rows.lay_out(StepPlan(0, (), (), grants, (RowWork(1, 0, [1, 2], sample=True),)))
    remember(rows, 1, 30)
    plan = StepPlan(1, (), (), (), (), decoding((1, 2)))
    batch = batch_of(rows, plan)
    assert batch.input_ids.tolist() == [30, LANDMARK]
    assert batch.slot.tolist() == [2, 3]
    remember(rows, 1, 31)
    plan = StepPlan(2, (), (), (), (), decoding((1, 3)))
    batch = batch_of(rows, plan)
    assert (batch.input_ids.tolist(), batch.slot.tolist()) == ([31], [4])
    assert batch.positions.tolist() == [3]


def test_a_page_granted_anew_replaces_the_old_one():
    rows = make_rows(4, landmarks=True)
    work = (RowWork(0, 0, np.array([1, 2]), sample=True),)
    for page in (3, 8):
        plan = StepPlan(0, (), (), (PageGrant(0, 0, (page,)),), work)
        (place,) = batch_of(rows, plan).places
        assert place.location.tolist() == [4 * page, 4 * page + 1]


def test_window_layers_write_to_pages_of_their_own():
    """A prefix of five pages is resumed: the window layers have its last two pages, and the new
    ones."""
    rows = Rows(3, 40, SlotMap(4, True), LANDMARK, torch.device("cpu"), groups=2)
    first = PageGrant(1, 0, (9, 8, 7, 6, 5, 4), window=(20, 21, 22))
    plan = StepPlan(0, (), (), (first,), (RowWork(1, 15, [5, 6], False),))
    whole, window = batch_of(rows, plan).places
    assert whole.location.tolist() == [16, 17]
    assert window.location.tolist() == [4 * 22, 4 * 22 + 1]
    assert window.page_table[1, 3:6].tolist() == [20, 21, 22]
    assert whole.page_table[1, :6].tolist() == [9, 8, 7, 6, 5, 4]
    both = (PageGrant(1, 6, (3,), (23,)), PageGrant(0, 0, (2,), (24,)))
    work = (RowWork(1, 17, [7, 8], False), RowWork(0, 0, [9], False))
    batch = batch_of(rows, StepPlan(1, (), (), both, work))
    assert [place.location.tolist() for place in batch.places] == [
        [18, 19, 12, 8], [4 * 22 + 2, 4 * 22 + 3, 4 * 23, 4 * 24]
    ]  # fmt: skip
    # The tables stay at the same address.
    assert window.page_table[1, 6] == 23 and window.page_table[0, 0] == 24
    assert batch.completed_pages.tolist() == [4]
    shared = batch_of(make_rows(4, True), StepPlan(2, (), (), both[1:], work[1:]))
    assert len(shared.places) == 1


def test_runs_of_rows_known_on_the_host():
    rows = make_rows(16, True, num_rows=3)
    grants = tuple(PageGrant(r, 0, tuple(range(10 * r, 10 * r + 10))) for r in range(3))
    chunk = RowWork(2, 0, [1] * 60, sample=True)
    layout = rows.lay_out(StepPlan(0, (), (), grants, (chunk,), decoding((0, 7), (1, 14))))
    known = layout.rows
    assert known.decoding == 2
    # The second row's token completes its page, so the end of the page runs, too.
    assert known.segments == [0, 7, 1, 1, 14, 2, 2, 0, 64]
    assert known.slot.tolist() == layout.slot.tolist() == [7, 14, 15, *range(64)]
    assert layout.start.tolist() == [0, 1, 3] and layout.last.tolist() == [0, 1, 65]
    assert rows.lay_out(StepPlan(1, (), (), (), (chunk,))).rows.decoding == 0
