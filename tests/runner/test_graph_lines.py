"""Inputs of a decode graph; the CPU acts as a GPU, and replaying a graph calls its function
again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cairn.attention.cuts import Cuts
from cairn.cache.landmarks import SlotMap
from cairn.runner import graphs
from cairn.runner.drafts import Drafts, Entries
from cairn.runner.graphs import DecodeGraphs, Ending, Place, Sampling
from cairn.runner.rows import NO_GRANTS, Rows
from cairn.runner.sampler import Draws
from cairn.runner.step import DecodeWork, PageGrant, RowWork, StepPlan
from tests.runner.playing import LANDMARK, MAX_PAGES, VOCAB, Model, NoBackends, check_batch, chosen

DTYPES = (np.float32, np.int64, np.float32, np.float32, np.int64, np.int64)
"""Seed of the random schedules."""


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("landmarks", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_steps_one_after_the_other(no_gpu, num_rows, landmarks, groups):
    """Rows that begin and end, grants of one and of many pages: the graph reads the layout, also
    from its own page tables, and padding that belongs to no row."""
    rng, size = random.Random(num_rows), 4
    slots = SlotMap(size, landmarks)
    sizes = num_rows, MAX_PAGES, slots, LANDMARK, torch.device("cpu"), groups
    # The host's layout, and the device's tables.
    rows, device = Rows(*sizes), Rows(*sizes)
    many = num_rows * MAX_PAGES
    spare = (many, many + 1)[:groups]
    tables, last_token, model, backends = device.tables, device.last_token, Model(), NoBackends()
    decoder = DecodeGraphs(model, Place(backends, device, spare), num_rows)
    done, granted = [0] * num_rows, [0] * num_rows
    told = np.zeros(num_rows, dtype=np.int64)
    on_the_way, arrays = [], {}
    for step in range(60):
        running = sorted(rng.sample(range(num_rows), rng.randint(1, num_rows)))
        grants = []
        for r in running:
            if done[r] + 2 >= MAX_PAGES * (size - 1) or rng.random() < 0.05:
                # Another request takes the row, far into its sequence.
                done[r], granted[r] = rng.randrange(20 * (size - 1)), 0
            need = int(slots.pages_for(done[r] + 1))
            if need > granted[r]:
                pages = tuple(rng.randrange(many) for _ in range(need - granted[r]))
                behind = tuple(page + 1 for page in pages[-2:]) if groups > 1 else ()
                grants.append(PageGrant(r, granted[r], pages, behind))
                granted[r] = need
        first = [done[r] for r in running]
        decode = DecodeWork.of(running, first, [0] * len(running))
        # Equal rows are the same array, as from the scheduler.
        decode = decode._replace(row=arrays.setdefault(tuple(running), decode.row))
        plan = StepPlan(step, (), (), tuple(grants), (), decode)
        layout = rows.lay_out(plan)
        ending = rng.choice([Ending.GREEDY, Ending.LOGITS, Ending.REPORT])
        draws = None
        if ending is Ending.REPORT:
            draws = Draws(*(np.zeros(len(running), t) for t in DTYPES))
        elif ending is Ending.LOGITS and rng.random() < 0.5:
            draws = Draws(*(np.full(len(running), step + i, t) for i, t in enumerate(DTYPES)))
        replayed = decoder.run(decode, rows.grant(plan), Sampling(ending, draws))
        for r in running:
            done[r] += 1
        assert replayed is not None
        output, trip, sent, _ = replayed
        left = draws if ending is Ending.LOGITS else None
        assert (sent is None) == (left is None)
        for mine, given in zip(sent or (), left or (), strict=True):
            assert mine.numpy().dtype == given.dtype and mine.tolist() == given.tolist()
        if ending is Ending.LOGITS:
            decoder.answer(replayed, last_token[torch.tensor(running)])
        on_the_way.append((trip, last_token[torch.tensor(running)].tolist()))
        if len(on_the_way) > step % 6:
            # Results arrive in order; up to six are pending at once.
            arrived, tokens = on_the_way.pop(0)
            assert arrived.tokens() == tokens
        if ending is not Ending.LOGITS:
            tokens = [chosen(slots.slot_of(n), r) for n, r in zip(first, running, strict=True)]
            taken = output if ending is Ending.GREEDY else output[:, VOCAB]
            assert taken.tolist() == tokens
            told_before = told.copy()
            told[running] = tokens
            assert last_token[:num_rows].tolist() == told.tolist()
        else:
            told_before = told
        check_batch(model.batch, layout, told_before, spare)
        assert backends.cuts == Cuts(False, len(model.batch.slot))
        assert [place.page_table.data_ptr() for place in model.batch.places] == [
            table.data_ptr() for table in device.page_tables
        ]
        assert model.batch.max_slot == device.capacity - 1
        assert torch.equal(tables[:-1], rows.tables[:-1])


@pytest.mark.parametrize("landmarks", [False, True])
@pytest.mark.parametrize("ending", [Ending.GREEDY, Ending.LOGITS, Ending.REPORT])
def test_steps_with_guesses(no_gpu, landmarks, ending):
    """Rows with any number of right and wrong guesses next to decoding rows: the graph runs the
    layout, and the next step runs the last accepted token."""
    rng, num_rows, slots = random.Random(3), 6, SlotMap(4, landmarks)
    sizes = num_rows, MAX_PAGES, slots, LANDMARK, torch.device("cpu")
    rows, device, model = Rows(*sizes), Rows(*sizes), Model()
    place = Place(NoBackends(), device, (num_rows * MAX_PAGES,))
    decoder = DecodeGraphs(model, place, num_rows, drafts=5)
    pages = [tuple(range(r * MAX_PAGES, (r + 1) * MAX_PAGES)) for r in range(num_rows)]
    granted = tuple(PageGrant(r, 0, pages[r]) for r in range(num_rows))
    for tables in (rows, device):
        tables.grant(StepPlan(0, (), (), granted, ()))
    done, told = [0] * num_rows, np.zeros(num_rows + 1, dtype=np.int64)
    for step in range(40):
        running = sorted(rng.sample(range(num_rows), rng.randint(1, num_rows)))
        if max(done) > 90:
            done = [0] * num_rows
        decoding = running[: rng.randrange(len(running))]
        works = []
        for r in running[len(decoding) :]:
            truth = [chosen(slots.slot_of(done[r] + i), r) for i in range(rng.randrange(6))]
            guesses = [t if rng.random() < 0.8 else (t + 1) % VOCAB for t in truth]
            first = int(told[r]) if rng.random() < 0.5 else 3
            works.append(RowWork(r, done[r], [first, *guesses], True, 1, drafts=len(guesses)))
        decode = DecodeWork.of(decoding, [done[r] for r in decoding], [1] * len(decoding))
        plan = StepPlan(step, (), (), (), tuple(works), decode)
        layout, entries, drafts = rows.lay_out(plan), Entries.of(plan), Drafts.of(plan)
        sampling = Sampling(ending)
        if ending is Ending.REPORT:
            count = len(entries.work.row)
            sampling = Sampling(ending, Draws(*(np.zeros(count, t) for t in DTYPES)))
        replayed = decoder.run(entries.work, NO_GRANTS, sampling, entries.given)
        check_batch(model.batch, layout, told, (num_rows * MAX_PAGES,))
        tokens = [
            chosen(slots.slot_of(n), r)
            for n, r in zip(entries.work.first.tolist(), entries.work.row.tolist(), strict=True)
        ]
        if ending is Ending.LOGITS:
            decoder.answer(replayed, torch.tensor(tokens))
        assert replayed.trip.tokens() == tokens
        counts = [1] * len(running) if drafts is None else drafts.counts(tokens)
        for r, count in zip(running, counts, strict=True):
            told[r] = chosen(slots.slot_of(done[r] + count - 1), r)
            done[r] += count
        assert device.last_token[:num_rows].tolist() == told[:num_rows].tolist()
    assert len(decoder._captured) > 3


def test_entries_are_those_of_rows_that_decode():
    """A chunk of a prompt, or a prompt of one token, is not a decode step."""
    decode = DecodeWork.of([4], [7], [2])
    guessing = RowWork(1, 5, [3, 8, 9], True, 4, drafts=2, ahead=3)
    plan = StepPlan(0, (), (), (), (guessing,), decode)
    work, given, ahead = Entries.of(plan)
    assert work.row.tolist() == [4, 1, 1, 1] and work.first.tolist() == [7, 5, 6, 7]
    assert work.output_index.tolist() == [2, 4, 5, 6] and given.tolist() == [-1, -5, 8, 9]
    assert ahead.tolist() == [0, 3, 3, 3]
    assert Entries.of(plan._replace(work=()))[:2] == (decode, None)
    for other in (
        RowWork(2, 0, [3], True),
        RowWork(2, 0, [3, 4], False),
        RowWork(2, 3, [3], False),
    ):
        assert Entries.of(plan._replace(work=(guessing, other))) is None


def test_a_drawing_graph_gets_its_numbers(no_gpu, monkeypatch):
    slots = SlotMap(4, True)
    rows = Rows(3, MAX_PAGES, slots, LANDMARK, torch.device("cpu"))
    device = Rows(3, MAX_PAGES, slots, LANDMARK, torch.device("cpu"))
    place = Place(NoBackends(), device, (99,))
    seen = []

    def draw(logits, *draws):
        seen.append([line.clone() for line in draws])
        return logits.argmax(-1)

    monkeypatch.setattr(graphs.ops, "draw_tokens", draw)
    decoder = DecodeGraphs(Model(), place, 3)
    rows.lay_out(StepPlan(0, (), (), (PageGrant(1, 0, (5,)),), (RowWork(1, 0, [4], True),)))
    decode = DecodeWork.of([1], [1], [1])
    draws = Draws(
        *(np.array([v], dtype=np.float32) for v in (0.5,)),
        *(np.array([7]), np.array([0.25], dtype=np.float32), np.array([0.125], dtype=np.float32)),
        *(np.array([-5]), np.array([1])),
    )
    decoder.run(decode, NO_GRANTS, Sampling(Ending.DRAW, draws))
    assert [line[0].item() for line in seen[-1]] == [0.5, 7, 0.25, 0.125, -5, 1]
    assert seen[-1][0].dtype == torch.float32
    # A graph that also reports log-probabilities samples in the same way.
    draws = draws._replace(number=np.array([2]))
    decoder.run(decode, NO_GRANTS, Sampling(Ending.REPORT, draws))
    assert [line[0].item() for line in seen[-1]] == [0.5, 7, 0.25, 0.125, -5, 2]
