"""Tile sizes and splits of decode calls."""

from dataclasses import replace

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.flash_attn import launch
from tests.ops.launches import on_hopper

HALF, SINGLE, PACKED = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def task(batch, kv_heads, width, context, dtype=HALF, *, tokens=1, paged=False):
    """A task with groups of 4 heads and tensors without memory."""
    keys = (batch, context, kv_heads, width)
    table = None
    if paged:
        keys = (7, 64, kv_heads, width)
        table = torch.empty(batch, context // 64, device="meta")
    q = torch.empty(batch, tokens, 4 * kv_heads, width, dtype=dtype, device="meta")
    k = torch.empty(keys, dtype=dtype, device="meta")
    o = torch.empty(q.shape, dtype=HALF if dtype == PACKED else dtype, device="meta")
    lse = torch.empty(batch, 4 * kv_heads, tokens, device="meta")
    return launch.Task(*(q, k, k, o, lse, table, *[None] * 11), width**-0.5, -1, 0, 0, 0.0, tokens)


@pytest.mark.parametrize(
    "options, stages, splits",
    [
        ((64, 2, 64, 8192), 3, 2),
        ((8, 2, 64, 131072), 3, 16),
        ((1, 2, 64, 131072), 3, 128),
        ((1, 32, 128, 131072), 3, 4),
        # A split has at least two blocks.
        ((1, 2, 64, 512), 3, 4),
        ((1, 2, 64, 64), 3, 1),
        # More programs than four waves.
        ((600, 2, 64, 8192), 3, 1),
        # Each program has fewer bytes in flight.
        ((1, 32, 256, 131072), 2, 24),
        ((1, 32, 128, 131072, SINGLE), 2, 24),
        ((1, 32, 128, 131072, PACKED), 5, 24),
        ((8, 2, 64, 131072, PACKED), 5, 16),
    ],
)
def test_decode_fills_waves(options, stages, splits):
    given = task(*options)
    tiles = launch.tiles_of(given)
    assert (tiles.few, tiles.stages) == (True, stages)
    assert launch._splits(given, tiles, given.batch * given.k.shape[-2]) == splits


def test_pages_take_half_of_the_stages():
    paged = launch.tiles_of(task(1, 32, 128, 131072, paged=True))
    assert paged.stages == 5
    assert launch._splits(task(1, 32, 128, 131072, paged=True), paged, 32) == 4


@pytest.mark.parametrize(
    "options, tokens, joint",
    [
        ((64, 2, 64, 8192), 1, 2),
        ((64, 2, 64, 8192), 2, 2),
        # Two heads of 4 lines, of as many tokens, fill a tile.
        ((64, 2, 64, 8192), 3, 1),
        ((64, 3, 64, 8192), 1, 1),
        ((64, 2, 128, 8192), 1, 1),
        ((64, 2, 64, 8192, PACKED), 1, 1),
        # With 4-byte elements one head fills a cache line.
        ((64, 2, 64, 8192, SINGLE), 1, 1),
    ],
)
def test_two_narrow_heads_are_read_together(options, tokens, joint, monkeypatch):
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    given = task(*options, tokens=tokens)
    tiles = launch._joint(given, launch.tiles_of(given))
    assert tiles.joint == joint
    assert tiles.few == (tiles.tokens * tiles.joint * tiles.heads == 16)


def test_heads_that_lie_apart_are_read_alone():
    given = task(64, 2, 64, 8192)
    apart = torch.empty(64, 2, 8192, 64, dtype=HALF, device="meta").transpose(1, 2)
    tiles = launch.tiles_of(given)
    assert launch._joint(replace(given, k=apart), tiles).joint == 1
    assert launch._joint(replace(given, v=apart), tiles).joint == 1
    assert launch._joint(replace(given, k_descale=torch.empty(64, 2)), tiles).joint == 1


def test_prefill_is_split_until_a_device_is_full_twice():
    given = task(1, 2, 64, 8192, tokens=2048)
    tiles = launch.tiles_of(given)
    assert not tiles.few
    assert launch._splits(given, tiles, 200) == 2
    assert launch._splits(given, tiles, 264) == 1
    short = task(1, 2, 64, 64, tokens=64)
    assert launch._splits(short, launch.tiles_of(short), 8) == 1


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize("tokens, pdl", [(1, True), (4, True), (64, False)])
def test_decode_and_its_join_are_launched_early(tokens, pdl, monkeypatch):
    flash, join = on_hopper(monkeypatch, launch, "flash_kernel", "join_splits_kernel")
    launch.attend(task(1, 2, 64, 8192, tokens=tokens))
    assert (flash.pdl, join.pdl) == ([pdl], [pdl])
    # Both kernels wait for the previous one.
    assert flash.given[0]["PDL"] == join.given[0]["PDL"] == pdl
