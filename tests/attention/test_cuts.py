"""How a step's slots are divided into parts, from the rows of the step or for a graph's bucket."""

from __future__ import annotations

import random

import pytest
import torch

from cairn.attention.cuts import (
    UNCHUNKED,
    WHOLE,
    Cuts,
    Cutter,
    Front,
    Part,
    alone,
    attend_in_parts,
    decode_cuts,
    fewest_rows,
)
from tests.attention.steps import LANDMARK, PLAIN, backends_of, batch_of, rows_of

LIMITS = (Front(640, 40), Front(3200, 200))


@pytest.mark.parametrize(
    ("alone", "fronts", "cuts"),
    [
        (0, [], [(900, None)]),
        (0, [(400, 3)], [(400, 3), (500, None)]),
        (0, [(400, 3), (300, 7)], [(400, 3), (300, 7), (200, None)]),
        (0, [(900, 3)], [(900, 3)]),
        (0, [(900, 7)], [(900, 7)]),
        (16, [], [(16, None), (884, None)]),
        (16, [(400, 3)], [(16, None), (400, 3), (484, None)]),
        (16, [(400, 3), (484, 7)], [(16, None), (400, 3), (484, 7)]),
        (16, [(884, 3)], [(16, None), (884, 3)]),
        (700, [(100, 3)], [(640, None), (60, None), (100, 3), (100, None)]),
    ],
)
def test_fronts_are_attended_by_themselves_where_it_makes_a_difference(alone, fronts, cuts):
    told = Cuts(True, alone, tuple(Front(*front) for front in fronts))
    batch, segments, heard = batch_of([900]), [0, 0, 900], []

    def attend(part: Part) -> torch.Tensor:
        heard.append(part)
        assert part.segments is not None and sum(part.segments[2::3]) == len(part.slot)
        return part.of(batch.slot)

    found = attend_in_parts(batch, told, segments, attend, tiled=True, by_fronts=True)
    assert torch.equal(found, batch.slot)
    assert [(len(part.slot), part.pages) for part in heard] == cuts
    heard.clear()
    attend_in_parts(batch, told, segments, attend, tiled=True)
    assert {part.pages for part in heard} == {None}
    assert [len(part.slot) for part in heard][-1] == 900 - alone
    heard.clear()
    attend_in_parts(batch, told, segments, attend, tiled=False, by_fronts=True)
    (whole,) = heard
    assert whole.at is None and whole.segments == segments and whole.chunked


def test_parts_know_their_slots_of_each_row():
    """Every slot is in one part, with its row and its segment, for random cuts of random rows."""
    rng = random.Random(2)
    for _ in range(40):
        counts = [rng.choice([1, 1, 5, 90, 200]) for _ in range(rng.randint(1, 12))]
        batch, segments = batch_of(counts), rows_of([(0, n) for n in counts]).segments
        total, left = sum(counts), rng.randrange(sum(counts) + 1)
        cuts = Cuts(True, left, tuple(Front(n, 9) for n in {(total - left) // 3} if n))
        seen: list[tuple[int, int]] = []

        index = torch.arange(total)

        def attend(part: Part, index=index, seen=seen) -> torch.Tensor:
            named = [
                (row, slot)
                for row, first, count in zip(*(iter(part.segments),) * 3, strict=True)
                for slot in range(first, first + count)
            ]
            assert named == list(zip(part.row.tolist(), part.slot.tolist(), strict=True))
            seen.extend(named)
            return part.of(index)

        found = attend_in_parts(batch, cuts, segments, attend, tiled=True, by_fronts=True)
        assert torch.equal(found, index)
        assert seen == list(zip(batch.row.tolist(), batch.slot.tolist(), strict=True))


@pytest.mark.parametrize(
    ("rows", "slots", "count"),
    [
        *((0, 4096, 0), (1, 4096, 16), (16, 17, 16), (16, 4096, 16), (17, 4096, 64), (17, 60, 60)),
        *((64, 65, 64), (65, 300, 256), (255, 320, 256), (256, 257, 256), (257, 4096, 512)),
        *((257, 300, 300), (1000, 4096, 1024)),
    ],
)
def test_how_many_are_alone(rows: int, slots: int, count: int):
    assert alone(rows, slots) == count
    least = fewest_rows(count, slots)
    assert least <= rows and alone(least, slots) == count
    assert least == 0 or alone(least - 1, slots) < count


def test_single_tokens_beside_a_chunk_decode():
    chunk, cutter = (0, 64), Cutter(())
    both = cutter.of_step(rows_of([(7, 1), (14, 2), chunk], decoding=2))
    assert both == Cuts(True, 16)
    # The landmark of the second row is single, too.
    assert cutter.of_step(rows_of([(7, 1), (14, 2)], decoding=2)) == Cuts(False, 3)
    assert cutter.of_step(rows_of([chunk])) == Cuts(True, 0)
    assert decode_cuts(3) == Cuts(False, 3)


def test_slots_are_chunks_where_rows_have_many():
    cutter = Cutter(())
    assert cutter.of_step(rows_of([(0, 16), (5, 16)])).chunked
    assert not cutter.of_step(rows_of([(0, 16), (5, 15)])).chunked


def test_the_early_part_of_a_step_is_before_the_fronts_slot():
    """A front is cut off only if it is large enough for its own launch, at aligned addresses."""

    def early(*chunks: tuple[int, int], decoding: bool = False, limit: int = 640) -> int:
        cutter = Cutter([Front(limit, 10)])
        rows = rows_of([(700, 1), *chunks] if decoding else chunks, int(decoding))
        found = cutter.of_step(rows)
        assert found.alone == 16 * decoding
        check_within(rows, found, cutter.limits)
        return found.fronts[0].slots if found.fronts else 0

    assert early((0, 500)) == early((100, 500)) == 500
    assert early((0, 20), (3, 30)) == 50
    assert early((0, 1000)) == 640
    assert early((5, 1000)) == 624  # not 635
    assert early((0, 100), (0, 250), (630, 20)) == 352  # not 360
    assert early((400, 300)) == early((900, 100)) == 0
    assert (early((384, 300)), early((385, 300))) == (256, 0)
    assert early((0, 1000), decoding=True) == 624  # of 625: 15 more are alone
    assert early((0, 500), decoding=True) == 485
    assert early((0, 500), limit=0) == 0


def check_within(rows, cuts: Cuts, limits) -> None:
    """Every slot of a front is below the limit of the front."""
    begin, most = cuts.alone, {limit.pages: limit.slots for limit in limits}
    for front in cuts.fronts:
        assert (rows.slot[begin : begin + front.slots] < most[front.pages]).all()
        begin += front.slots


def test_the_second_front_follows_the_first():
    """The second front has all other slots or none."""

    def fronts(*chunks: tuple[int, int]) -> tuple[Front, ...]:
        rows, cutter = rows_of(chunks), Cutter(LIMITS)
        found = cutter.of_step(rows)
        check_within(rows, found, LIMITS)
        return found.fronts

    assert fronts((0, 500)) == ((500, 40),)
    assert fronts((0, 700)) == ((640, 40), (60, 200))
    assert fronts((0, 3200)) == ((640, 40), (2560, 200))
    assert fronts((0, 3201)) == fronts((0, 5000)) == ((640, 40),)
    assert fronts((700, 300)) == ((300, 200),)
    assert fronts((700, 2500)) == ((2500, 200),)
    assert fronts((700, 2501)) == ()
    assert fronts((0, 640), (3000, 300), (5000, 10)) == ((640, 40),)
    assert fronts((4000, 2000)) == ()


def test_a_bucket_of_few_slots_of_many_rows_is_whole():
    cutter = Cutter(LIMITS)
    rows = rows_of([(n, 9) for n in range(20)])
    assert cutter.of_bucket(rows, UNCHUNKED) == WHOLE
    # With many slots the results are equal.
    assert cutter.of_bucket(rows, UNCHUNKED + 64).chunked


def test_a_bucket_has_the_cuts_that_waste_least():
    """Padding after a step may be in any front."""
    cutter = Cutter((Front(32, 8),))

    def fronts(*chunks: tuple[int, int], bucket: int = 320, decoding: int = 0):
        return cutter.of_bucket(rows_of(chunks, decoding), bucket)

    assert fronts((0, 24)) == Cuts(True, 0, (Front(320, 8),))
    assert fronts((10, 23)) == Cuts(True, 0)
    rows = [(80, 1)] * 17
    assert fronts(*rows, (0, 24), decoding=17) == Cuts(True, 64, (Front(256, 8),))
    # Here some slots of the row are among the single ones.
    assert fronts(*rows, (8, 80), decoding=17) == Cuts(True, 64)


@pytest.mark.parametrize("limits", [(), LIMITS[:1], LIMITS, (Front(32, 4),), (Front(0, 0),)])
def test_every_step_has_cuts_among_its_buckets_cuts(limits):
    """The fronts contain the slots that they declare."""
    rng, cutter, num_rows = random.Random(1), Cutter(limits), 40
    for _ in range(300):
        bucket = rng.choice([16, 64, 128, 256, 320, 1024, 4096])
        chunks: list[tuple[int, int]] = []
        decoding = rng.choice([0, 0, 1, 5, 20])
        chunks += [(rng.randrange(5000), 1) for _ in range(decoding)]
        while len(chunks) < num_rows and (not chunks or rng.random() < 0.7):
            first = rng.choice([0, 0, rng.randrange(700), rng.randrange(5000)])
            chunks.append((first, rng.choice([1, 2, 20, 300, 700])))
        if sum(count for _, count in chunks) > bucket or len(chunks) == decoding:
            continue
        rows = rows_of(chunks, decoding)
        found = cutter.of_bucket(rows, bucket)
        assert found == WHOLE or found in cutter.all_of_bucket(bucket, num_rows)
        assert found.alone >= decoding or found == WHOLE
        assert found.alone + sum(front.slots for front in found.fronts) <= bucket
        check_within(rows, found, limits)


def test_the_cpu_cuts_no_slots_off():
    """The tiles of a chunk belong to one row each."""
    backends, rows = backends_of([LANDMARK, PLAIN]), rows_of([(80, 1), (0, 300)], 1)
    assert backends.cuts(rows, on_cpu=True) == Cuts(True)
    assert backends.cuts(rows, on_cpu=False) == Cuts(True, 16)
