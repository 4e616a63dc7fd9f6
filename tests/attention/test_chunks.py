"""How a backend has its op cut a step: whether slots are chunks of rows, and which are alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cairn import ops
from cairn.attention.base import (
    AttentionLayer,
    Batch,
    Front,
    LandmarkRule,
    Part,
    alone,
    fronts_of,
)
from cairn.attention.hsa import HsaBackend
from cairn.attention.registry import assign, cache_specs
from cairn.cache.pools import CachePools, PageFormat
from cairn.ops.attention.launch import SPLIT_TOKENS
from cairn.ops.landmark.select_task import candidate_pages

SIZE, TOKENS = 8, 20
PLAIN = AttentionLayer(0, "dense", num_heads=4, num_kv_heads=2, head_dim=16)
LANDMARK = LandmarkRule(topk=2, window=9, softmax1=True, summary="mean", bias=False)
LAYERS = {
    "dense_attention": PLAIN,
    "window_attention": replace(PLAIN, backend="window", window=9),
    "landmark_attention": replace(PLAIN, backend="hsa", landmark=LANDMARK),
}


def step(
    layer: AttentionLayer, counts: list[int], device: str = "cpu", most: int = 0, **kinds: Any
) -> Batch:
    """The first slots of rows, so many of each, in pools of nothing but numbers; `most`: what is
    told of the largest slot, if it is not that."""
    pages = [-(-count // SIZE) for count in counts]
    form, where = PageFormat(SIZE, torch.float32), torch.device(device)
    pools = CachePools(cache_specs([layer]), sum(pages), form, where)
    for tensor in pools.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.manual_seed(1)))
    table = torch.zeros(len(counts), max(pages) + 1, dtype=torch.int32)
    for row, (page, count) in enumerate(zip(itertools.accumulate(pages), pages, strict=True)):
        table[row, :count] = torch.arange(page - count, page)
    slot = torch.cat([torch.arange(count) for count in counts])
    row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    page = table[row, slot // SIZE].long()
    done = (slot % SIZE == SIZE - 1).nonzero()[:, 0]
    numbers = (slot, slot, row, slot, page * SIZE + slot % SIZE, table, done, page[done])
    return Batch(
        *(part.to(where) for part in numbers),
        max_slot=max(most, *counts) - 1,
        backends=assign([layer], pools),
        **kinds,
    )


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_hint_reaches_the_op(name: str, chunked: bool, monkeypatch: pytest.MonkeyPatch):
    op, heard = getattr(ops, name), []

    def hear(*args, chunked: bool, **kwargs):
        heard.append(chunked)
        return op(*args, chunked=chunked, **kwargs)

    monkeypatch.setattr(ops, name, hear)
    layer = LAYERS[name]
    batch = step(layer, [TOKENS], chunked=chunked)
    q = torch.randn(TOKENS, layer.num_heads, layer.head_dim)
    k = torch.randn(TOKENS, layer.num_kv_heads, layer.head_dim)
    out = batch.attend(0, q, k, k, q)
    assert heard == [chunked]
    assert out.shape == q.shape and bool(out.isfinite().all())


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_slots_that_are_alone_are_attended_by_themselves(
    name: str, count: int, told: bool, monkeypatch: pytest.MonkeyPatch
):
    """The same attention; the op is given them, and then the chunks with what is left of their
    rows."""
    op, heard = getattr(ops, name), []

    def hear(q, *args, **kwargs):
        heard.append((len(q), kwargs["chunked"], kwargs.get("stretches")))
        return op(q, *args, **kwargs)

    layer, counts = LAYERS[name], [*[1] * 20, 200, 80]
    stretches = [n for row, many in enumerate(counts) for n in (row, 0, many)]
    q, k = (torch.randn(300, heads, 16) for heads in (layer.num_heads, layer.num_kv_heads))
    kinds = {"chunked": True, "stretches": stretches if told else None}
    wanted = step(layer, counts, **kinds).attend(0, q, k, k, q)
    monkeypatch.setattr(ops, name, hear)
    torch.testing.assert_close(
        step(layer, counts, alone=count, **kinds).attend(0, q, k, k, q), wanted
    )
    front = stretches[: 3 * 16] if count == 16 else [*stretches[: 3 * 20], 20, 0, 44]
    behind = stretches[3 * 16 :] if count == 16 else [20, 44, 156, 21, 0, 80]
    given = told and name == "dense_attention"
    assert heard == [
        (count, False, front if given else None),
        (300 - count, True, behind if given else None),
    ]
    heard.clear()
    # Of few tokens nothing is cut into tiles.
    few = step(layer, counts[:20], alone=count, chunked=False)
    few.attend(0, q[:20], k[:20], k[:20], q[:20])
    assert heard == [(20, False, None)]


def test_what_is_watched_is_attended_in_one():
    layer, counts = LAYERS["landmark_attention"], [*[1] * 20, 280]
    batch = step(layer, counts, chunked=True, alone=16, watch=torch.tensor([3, 299]))
    q, k = (torch.randn(300, heads, 16) for heads in (layer.num_heads, layer.num_kv_heads))
    batch.attend(0, q, k, k, q)
    (reads,) = batch.reads
    assert reads.pages.shape[0] == reads.weights.shape[0] == 2
    assert reads.pages[0].eq(-1).all() and reads.pages[1].ge(0).all()


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("window", [1, 7, 8, 9, 200])
def test_a_rule_knows_slots_that_select_all_their_candidates(window: int, size: int):
    slots = replace(LANDMARK, window=window).short_pages(size) * size
    counts = candidate_pages(torch.arange(slots + size), size, window)
    assert counts[:slots].max() == LANDMARK.topk < counts[-1]
    assert replace(LANDMARK, window=0).short_pages(size) == 0


def test_early_chunks_show_a_table_of_what_they_select(monkeypatch: pytest.MonkeyPatch):
    op, heard = ops.landmark_attention, []

    def hear(q, *args, **kwargs):
        heard.append((len(q), args[7].shape[1]))
        return op(q, *args, **kwargs)

    monkeypatch.setattr(ops, "landmark_attention", hear)
    layer = replace(PLAIN, backend="hsa", landmark=replace(LANDMARK, window=200))
    (front,) = fronts_of(step(layer, [1]).backends.values(), SIZE)
    early = front.slots
    assert front == (208, 27)  # of 216
    q, k = (torch.randn(early + 300, heads, 16) for heads in (4, 2))

    def attend(counts: list[int], **kinds: Any) -> torch.Tensor:
        tokens = sum(counts)
        batch = step(layer, counts, chunked=True, **kinds)
        return batch.attend(0, *(x[:tokens] for x in (q, k, k, q)))

    for counts, fronts, parts in (
        ([early, 16], [(early + 16, 27)], [(early + 16, 27)]),
        ([early + 50], [(early, 27)], [(early, 27), (50, 34)]),
        ([early + 50], [(early, 27), (50, 33)], [(early, 27), (50, 33)]),
        ([early + 250], [(early, 27), (60, 40)], [(early, 27), (60, 40), (190, 59)]),
        # Of few tokens nothing is cut into tiles, nor of those that are looked at.
        ([40], [(40, 27)], [(40, 6)]),
        ([40, early], [(40, 27)], [(40 + early, 27)]),
    ):
        looks = {"watch": torch.tensor([3])} if counts == [40, early] else {}
        wanted = attend(counts)
        heard.clear()
        found = attend(counts, fronts=tuple(Front(*front) for front in fronts), **looks)
        torch.testing.assert_close(found, wanted)
        assert heard == parts


def test_fronts_of_rows_are_those_of_all_layers_that_look_for_pages():
    """The second one's where a backend has such; none of a layer that takes its window alone."""
    looking = replace(PLAIN, backend="hsa", landmark=replace(LANDMARK, window=200))
    wider = replace(looking, landmark=replace(LANDMARK, window=300))

    class Near(HsaBackend):
        def near_pages(self, layer):
            return 50 if layer is wider else 40

    without = step(looking, [1]).backends[0][0]
    with_near = Near(without.pools)
    both = [(with_near, wider), (with_near, looking)]
    assert fronts_of(both, SIZE) == ((208, 27), (320, 40))
    assert fronts_of([(with_near, wider)], SIZE) == ((320, 40), (400, 50))
    assert fronts_of([*both, (without, PLAIN)], 7) == ((208, 31), (272, 40))
    assert fronts_of([(without, wider), (with_near, looking)], SIZE) == ((208, 27),)
    assert fronts_of([(without, replace(looking, backend="window"))], SIZE) == ()


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
    told = tuple(Front(*front) for front in fronts)
    batch = step(PLAIN, [900], chunked=True, alone=alone, fronts=told, stretches=[0, 0, 900])
    heard = []

    def attend(part: Part) -> torch.Tensor:
        heard.append(part)
        assert part.stretches is not None and sum(part.stretches[2::3]) == len(part.slot)
        return part.of(batch.slot)

    assert torch.equal(batch.attend_parts(True, attend, by_fronts=True), batch.slot)
    assert [(len(part.slot), part.pages) for part in heard] == cuts
    heard.clear()
    batch.attend_parts(True, attend)
    assert {part.pages for part in heard} == {None}
    assert [len(part.slot) for part in heard][-1] == 900 - alone


@pytest.mark.parametrize("name", LAYERS)
def test_many_rows_that_decode_are_never_cut_into_tiles(name: str, monkeypatch: pytest.MonkeyPatch):
    op, heard = getattr(ops, name), []

    def hear(q, *args, **kwargs):
        heard.append(len(q))
        return op(q, *args, **kwargs)

    rows = SPLIT_TOKENS + 8
    layer, counts = LAYERS[name], [1] * rows
    q, k = (torch.randn(rows, heads, 16) for heads in (layer.num_heads, layer.num_kv_heads))
    wanted = step(layer, counts).attend(0, q, k, k, q)
    monkeypatch.setattr(ops, name, hear)
    torch.testing.assert_close(step(layer, counts, alone=rows).attend(0, q, k, k, q), wanted)
    assert heard == [SPLIT_TOKENS, 8]
    heard.clear()
    step(layer, counts[:300], alone=300).attend(0, q[:300], k[:300], k[:300], q[:300])
    assert heard == [300]


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
