"""landmark_attention that passes over all pages of short rows, by groups of warps."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import gpu, landmark_attention
from cairn.ops.attention import launch, window_launch
from cairn.ops.landmark import page_tiles
from cairn.ops.landmark.page_launch import Window
from tests.ops.attention.test_window_groups import HEADS, as_on_hopper, drawn, near, needs_groups

WINDOW = 256
STEPS = [
    [(0, 300)],
    [(1000, 900)],
    [(1333, 777)],
    [(0, 800), (0, 800)],
    [(1300, 100), (0, 64), (200, 3), (2000, 200)],
]


@pytest.mark.gpu
@needs_groups
@pytest.mark.parametrize("heads, kv_heads, dim, dtype", HEADS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("topk, softmax1", [(8, True), (32, False), (3, True)])
@pytest.mark.parametrize("mixed", [False, True])
def test_what_sorted_pages_give(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    steps: list[tuple[int, int]],
    topk: int,
    softmax1: bool,
    mixed: bool,
) -> None:
    """Pages that all of a tile selected, some or none; tokens in any order, and padding."""
    q, k, v, row, slot, table = drawn(steps, heads, kv_heads, dim, dtype)
    if mixed:
        order = torch.randperm(len(row), device="cuda")
        row, slot = row[order], slot[order]
        slot[17], slot[201:210] = -1, -1
    z = torch.randn_like(q)
    key = torch.randn(len(k), kv_heads, dim, device="cuda").to(dtype)
    given = (q, z, k, v, key, None, row, slot, table, WINDOW, topk, softmax1)
    wanted, indices, scores, _ = landmark_attention.using("triton_many")(*given)
    task = launch.Task(q, k, v, row, slot, table, WINDOW, None, True, True)
    assert page_tiles.fits(task, topk)
    beside = Window(*window_launch.attend(task, dtype), softmax1)
    found = page_tiles.attend(task, indices, scores, beside)
    near(found, wanted)
    assert torch.equal(found, page_tiles.attend(task, indices, scores, beside))


@pytest.mark.parametrize(
    "heads, dim, tokens, pages, taken",
    [
        *(((16, 2), 64, 800, 80, True), ((16, 2), 64, 800, 81, False)),
        *(((16, 2), 64, 700, 60, False), ((32, 32), 128, 400, 160, True)),
        *(((32, 32), 128, 400, 161, False), ((32, 32), 128, 300, 100, False)),
    ],
)
def test_rows_for_which_it_pays(
    heads: tuple[int, int],
    dim: int,
    tokens: int,
    pages: int,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short ones, in steps of tiles for most processors."""
    as_on_hopper(monkeypatch)
    q, k, v, row, slot, _ = drawn([(0, tokens)], *heads, dim, torch.bfloat16, device="cpu")
    table = torch.zeros(1, pages, dtype=torch.int32)
    z, key = q, torch.zeros(len(k), heads[1], dim, dtype=q.dtype)
    given = (q, z, k, v, key, None, row, slot, table, 512, 32, True)
    near_rows = landmark_attention.implementations["gluon"].when
    assert near_rows is not None
    assert near_rows(*given) == taken
    assert not near_rows(*given, strategy="group")
    monkeypatch.setattr(gpu, "multiplies_in_groups", lambda device: False)
    assert not near_rows(*given)


def test_pages_of_one_block_and_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_hopper(monkeypatch)
    task = launch.Task(*drawn([(0, 200)], 4, 2, 64, torch.bfloat16, device="cpu"), 512)
    assert page_tiles.fits(task, 64)
    assert not page_tiles.fits(task, 65)
    task = launch.Task(*drawn([(0, 200)], 4, 2, 64, torch.bfloat16, 128, "cpu"), 512)
    assert not page_tiles.fits(task, 32)


def test_caches_of_which_rows_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.empty(3, 2, 64, 128, dtype=torch.bfloat16)
    assert page_tiles.most_pages(cache, 32) == 0
    as_on_hopper(monkeypatch)
    assert page_tiles.most_pages(cache, 32) == page_tiles.MOST_PAGES[128]
    assert page_tiles.most_pages(cache[..., :64], 64) == page_tiles.MOST_PAGES[64]
    for other in (cache.float(), cache.to(torch.uint8), cache[..., :80], cache[:, :, :32]):
        assert page_tiles.most_pages(other, 32) == 0
    assert page_tiles.most_pages(cache, 65) == 0
