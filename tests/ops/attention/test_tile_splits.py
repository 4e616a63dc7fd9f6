"""Tiles of tokens whose keys several programs share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cairn.ops import dense_attention, gpu
from cairn.ops.attention import launch
from cairn.ops.testing import Make, check
from tests.ops.attention.test_splits import task

needs_triton = pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize("mask_landmarks", [False, True])
def test_same_attention_whatever_the_splits(
    splits: int, mask_landmarks: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one block and of many, tiles of several rows, padding, tokens in any order."""
    monkeypatch.setattr(launch, "_tile_splits", lambda *_: splits)
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        make = Make(device)
        paged = make.paged((300, 3, 140, 65, 500), 2, 16, 32, dtype=dtype)
        row, slot, _ = paged.queries((20, 3, 9, 1, 11))
        slot[-2:] = -1
        q = make.randn(len(row), 6, 32, dtype=dtype)
        mixed = make.rand(len(row)).argsort()
        caches = (paged.k_cache, paged.v_cache)
        for order in (make.arange(len(row)), mixed):
            given = (q[order], *caches, row[order], slot[order], paged.page_table)
            check(dense_attention, "triton_tiles", make.args(*given, 0.4, mask_landmarks))


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_chunk_far_behind_is_split_and_agrees() -> None:
    make = Make("cuda")
    paged = make.paged((20_000, 700), 2, 64, 64, dtype=torch.bfloat16)
    for counts in ((130, 0), (300, 200)):
        row, slot, _ = paged.queries(counts)
        q = make.randn(len(row), 16, 64, dtype=torch.bfloat16)
        caches = (paged.k_cache, paged.v_cache)
        check(
            dense_attention,
            "triton_tiles",
            make.args(q, *caches, row, slot, paged.page_table, chunked=True),
        )


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "past", "splits"),
    [
        (16, 2, None, 16),
        (512, 2, None, 8),
        (1024, 2, None, 4),
        (1100, 2, None, 1),  # two or three, if rows were known to be long
        (16, 2, 0, 1),
        (16, 2, 1008, 2),
        (1100, 2, 32768, 3),
        (3000, 2, 32768, 1),
    ],
)
def test_few_tiles_share_out_their_keys(
    tokens: int, kv_heads: int, past: int | None, splits: int
) -> None:
    tiles = -(-tokens // 32)
    given = task(tokens, kv_heads, 64, 131072)
    if past is not None:
        given = replace(given, stretches=[0, past, tokens])
    assert launch._tile_splits(given, tiles * kv_heads) == splits


def test_wide_heads_fill_a_device_with_half_as_many() -> None:
    assert launch._tile_splits(task(16, 32, 64, 131072), 32) == 8
    assert launch._tile_splits(task(16, 32, 128, 131072), 32) == 4
    assert launch._tile_splits(task(16, 32, 64, 448), 32) == 1
    assert launch._tile_splits(task(16, 32, 64, 131072, window=4096), 32) == 1
