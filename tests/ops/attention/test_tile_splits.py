"""Split-KV of tiles of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cairn.ops import dense_attention, gpu, window_attention
from cairn.ops.attention import launch
from cairn.ops.attention.tuning import TUNING
from cairn.ops.testing import Make, check
from tests.ops.attention.test_splits import task
from tests.ops.tables import Tuned

needs_triton = pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize(
    "splits, least, mask_landmarks",
    [
        pytest.param(2, 1, False, marks=pytest.mark.slow),
        (3, 1, True),
        (16, 1, False),
        (3, 3, True),
    ],
)
def test_same_attention_whatever_the_splits(
    splits: int,
    least: int,
    mask_landmarks: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    tuned: Tuned,
) -> None:
    """Rows of one and of many blocks, tiles with several rows, padding, tokens in any order."""
    monkeypatch.setattr(launch, "_tile_splits", lambda *_: splits)
    tuned(TUNING, tile_blocks=least)
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        make = Make(device)
        paged = make.paged((70, 3, 33, 40, 100), 2, 16, 32, dtype=dtype)
        row, slot, _ = paged.queries((20, 3, 9, 1, 11))
        slot[-2:] = -1
        q = make.randn(len(row), 6, 32, dtype=dtype)
        mixed = make.rand(len(row)).argsort()
        caches = (paged.k_cache, paged.v_cache)
        # Also in order, on a GPU, where it is fast.
        for order in (mixed, make.arange(len(row)))[: 1 if device == "cpu" and least == 1 else 2]:
            given = (q[order], *caches, row[order], slot[order], paged.page_table)
            check(dense_attention, "triton_tiles", make.args(*given, 0.4, mask_landmarks))


@needs_triton
@pytest.mark.parametrize("aligned", [False, True])
def test_padding_makes_no_tile_look_behind_its_window(aligned: bool, device: str) -> None:
    """Padding tokens of a row: slots before the window are not read."""
    make = Make(device)
    paged = make.paged((400, 90), 2, 16, 32, dtype=torch.float32)
    row, slot, _ = paged.queries((9, 0))
    row, slot = torch.cat((row, row[:3])), torch.cat((slot, torch.full_like(slot[:3], -1)))
    q = make.randn(len(row), 6, 32)
    first = int(slot[0]) - 40 + 1
    for cache in (paged.k_cache, paged.v_cache):
        cache[paged.page_table[0, : first // 16].long()] = float("nan")
    given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table)
    kinds = {"window": 40, "aligned": aligned, "mask_landmarks": True}
    own = (q[:9], *given[1:3], row[:9], slot[:9], paged.page_table)
    check(window_attention, "triton_tiles", make.args(*own, **kinds))
    o, lse = window_attention.using("triton_tiles")(*given, **kinds)
    wanted = window_attention.using("triton_tiles")(*own, **kinds)
    assert torch.equal(o[:9], wanted[0]) and torch.equal(lse[:9], wanted[1])
    assert not o[9:].any() and bool((lse[9:] == -torch.inf).all())


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_chunk_far_behind_is_split_and_agrees() -> None:
    make = Make("cuda")
    paged = make.paged((20_000, 700), 2, 64, 64, dtype=torch.bfloat16)
    for counts in ((130, 0), (300, 200)):
        row, slot, _ = paged.queries(counts)
        q = make.randn(len(row), 16, 64, dtype=torch.bfloat16)
        given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table)
        known = {"segments": paged.segments(counts), "chunked": True}
        check(dense_attention, "triton_tiles", make.args(*given, **known))


@pytest.mark.parametrize(
    ("tokens", "past", "splits"),
    [
        (16, 8192, 16),
        (128, 8192, 16),
        (512, 8192, 8),
        (1024, 8192, 4),
        (3000, 32768, 1),
        # The merge would take longer than splitting saves.
        (16, 0, 1),
        (128, 512, 1),
        (1024, 0, 1),
    ],
)
def test_few_tiles_share_out_their_keys(tokens: int, past: int, splits: int) -> None:
    given = replace(task(tokens, 2, 64, 131072), segments=[0, past, tokens])
    assert launch._tile_splits(given, 2 * -(-tokens // 32)) == splits


def test_tiles_are_split_by_the_longest_row() -> None:
    short, long = [0, 0, 30], [3, 20000, 34]
    for segments in (short + long, long + short, long):
        given = replace(task(64, 2, 64, 131072), segments=segments)
        assert launch._tile_splits(given, 4) == 16
    assert launch._tile_splits(replace(given, segments=short), 4) == 1


def test_wide_heads_fill_a_device_with_half_as_many() -> None:
    known = {"segments": [0, 30000, 16]}
    assert launch._tile_splits(replace(task(16, 32, 64, 131072), **known), 32) == 8
    assert launch._tile_splits(replace(task(16, 32, 128, 131072), **known), 32) == 4


def test_tiles_of_unknown_rows_and_of_windows_are_whole() -> None:
    assert launch._tile_splits(task(16, 2, 64, 131072), 2) == 1
    windowed = task(16, 2, 64, 131072, window=4096)
    assert launch._tile_splits(replace(windowed, segments=[0, 30000, 16]), 2) == 1


@needs_triton
@pytest.mark.parametrize(("tokens", "known", "splits"), [(63, 1, 1), (64, 1, 0), (64, 0, 1)])
def test_chunks_make_tiles_sooner_where_keys_are_shared(
    tokens: int, known: int, splits: int
) -> None:
    make = Make("cpu")
    paged = make.paged((300,), 2, 16, 32)
    row, slot, _ = paged.queries((tokens,))
    given = (make.randn(tokens, 4, 32), paged.k_cache, paged.v_cache, row, slot, paged.page_table)
    segments = paged.segments((tokens,)) if known else None
    hints = {"segments": segments, "chunked": True}
    assert dense_attention.accepts("triton_splits", *given, **hints) == splits
    assert dense_attention.accepts("triton_splits", *given, **hints | {"chunked": False})
