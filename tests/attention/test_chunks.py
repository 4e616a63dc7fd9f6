"""Hints that a backend passes to its op: which slots are chunks of rows, and which are single."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cairn import ops
from cairn.attention.cuts import Cuts, Front
from cairn.ops import planning
from cairn.ops.planning import SPLIT_TOKENS
from tests.attention.steps import (
    LANDMARK,
    PLAIN,
    SIZE,
    WINDOW,
    attend,
    backends_of,
    step_of,
)

TOKENS = 20
LAYERS = {
    "dense_attention": PLAIN,
    "window_attention": WINDOW,
    "landmark_attention": LANDMARK,
}


def drawn(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random queries and keys."""
    return torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_hint_reaches_the_op(name: str, chunked: bool, monkeypatch: pytest.MonkeyPatch):
    op, heard = getattr(ops, name), []

    def hear(*args, chunked: bool, **kwargs):
        heard.append(chunked)
        return op(*args, chunked=chunked, **kwargs)

    monkeypatch.setattr(ops, name, hear)
    q, k = drawn(TOKENS)
    out = attend(step_of(LAYERS[name], [TOKENS], Cuts(chunked)), q, k)
    assert heard == [chunked]
    assert out.shape == q.shape and bool(out.isfinite().all())


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_slots_that_are_alone_are_attended_by_themselves(
    name: str, count: int, told: bool, monkeypatch: pytest.MonkeyPatch
):
    """Chunks and single rows in one call, and in one call each, give the same attention."""
    op, heard = getattr(ops, name), []

    def hear(q, *args, **kwargs):
        heard.append((len(q), kwargs["chunked"], kwargs.get("segments")))
        return op(q, *args, **kwargs)

    layer, counts = LAYERS[name], [*[1] * 20, 200, 80]
    segments = [n for row, many in enumerate(counts) for n in (row, 0, many)]
    q, k = drawn(300)
    wanted = attend(step_of(layer, counts, Cuts(True), told), q, k)
    monkeypatch.setattr(ops, name, hear)
    torch.testing.assert_close(
        attend(step_of(layer, counts, Cuts(True, count), told), q, k), wanted
    )
    front = segments[: 3 * 16] if count == 16 else [*segments[: 3 * 20], 20, 0, 44]
    behind = segments[3 * 16 :] if count == 16 else [20, 44, 156, 21, 0, 80]
    given = told and name == "dense_attention"
    assert heard == [
        (count, False, front if given else None),
        (300 - count, True, behind if given else None),
    ]
    heard.clear()
    # Below a number of tokens, no tiles are used.
    attend(step_of(layer, counts[:20], Cuts(False, count)), q[:20], k[:20])
    assert heard == [(20, False, None)]


def test_watched_queries_run_in_one_chunk():
    watch = torch.tensor([3, 299])
    step = step_of(LANDMARK, [*[1] * 20, 280], Cuts(True, 16), watch=watch)
    attend(step, *drawn(300))
    (reads,) = step.reads()
    assert reads.layer == 0
    assert reads.pages.shape[0] == reads.weights.shape[0] == 2
    assert reads.pages[0].eq(-1).all() and reads.pages[1].ge(0).all()


def test_nothing_is_reported_that_nobody_watches():
    step = step_of(LANDMARK, [280])
    attend(step, *drawn(280))
    assert step.reads() == []


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("window", [1, 7, 8, 9, 200])
def test_of_short_rows_all_candidates_are_selected(window: int, size: int):
    slots = planning.short_pages(size, window, LANDMARK.topk) * size
    counts = planning.candidate_pages(torch.arange(slots + size), size, window)
    assert counts[:slots].max() == LANDMARK.topk < counts[-1]


def test_early_chunks_show_a_table_of_what_they_select(monkeypatch: pytest.MonkeyPatch):
    op, heard = ops.landmark_attention, []

    def hear(q, *args, **kwargs):
        heard.append((len(q), args[7].shape[1]))
        return op(q, *args, **kwargs)

    monkeypatch.setattr(ops, "landmark_attention", hear)
    layer = replace(LANDMARK, window=200)
    (front,) = backends_of([layer]).cutter.limits
    early = front.slots
    assert front == (208, 27)  # of 216
    q, k = drawn(early + 300)

    def run(counts: list[int], fronts: tuple[Front, ...] = (), watch=None) -> torch.Tensor:
        tokens = sum(counts)
        step = step_of(layer, counts, Cuts(True, 0, fronts), watch=watch)
        return attend(step, q[:tokens], k[:tokens])

    for counts, fronts, parts in (
        ([early, 16], [(early + 16, 27)], [(early + 16, 27)]),
        ([early + 50], [(early, 27)], [(early, 27), (50, 34)]),
        ([early + 50], [(early, 27), (50, 33)], [(early, 27), (50, 33)]),
        ([early + 250], [(early, 27), (60, 40)], [(early, 27), (60, 40), (190, 59)]),
        # Few tokens are not cut into tiles, also after the selection.
        ([40], [(40, 27)], [(40, 6)]),
        ([40, early], [(40, 27)], [(40 + early, 27)]),
    ):
        watch = torch.tensor([3]) if counts == [40, early] else None
        wanted = run(counts)
        heard.clear()
        found = run(counts, tuple(Front(*front) for front in fronts), watch)
        torch.testing.assert_close(found, wanted)
        assert heard == parts


def test_fronts_of_rows_are_those_of_all_layers_that_look_for_pages():
    """A layer that reads only its window has none."""
    looking = replace(LANDMARK, window=200)
    wider = replace(looking, window=300, num_kv_heads=4)

    def fronts(*mixers, size: int = SIZE) -> tuple[Front, ...]:
        return backends_of(mixers, size=size).cutter.limits

    assert fronts(wider) == ((320, 40),)
    assert fronts(wider, looking) == ((208, 27),)
    assert fronts(wider, looking, PLAIN, size=7) == ((208, 31),)
    assert fronts(wider, replace(looking, strategy="group")) == ((208, 27),)
    assert fronts(replace(looking, backend="window")) == ()
    assert fronts(PLAIN, WINDOW) == ()


@pytest.mark.parametrize("name", LAYERS)
def test_many_rows_that_decode_are_never_cut_into_tiles(name: str, monkeypatch: pytest.MonkeyPatch):
    op, heard = getattr(ops, name), []

    def hear(q, *args, **kwargs):
        heard.append(len(q))
        return op(q, *args, **kwargs)

    rows = SPLIT_TOKENS + 8
    layer, counts = LAYERS[name], [1] * rows
    q, k = drawn(rows)
    wanted = attend(step_of(layer, counts), q, k)
    monkeypatch.setattr(ops, name, hear)
    torch.testing.assert_close(attend(step_of(layer, counts, Cuts(False, rows)), q, k), wanted)
    assert heard == [SPLIT_TOKENS, 8]
    heard.clear()
    attend(step_of(layer, counts[:300], Cuts(False, 300)), q[:300], k[:300])
    assert heard == [300]
