"""Number of splits (split-KV) of a token's keys."""

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.attention import launch
from cairn.ops.attention.launch import whole_waves
from cairn.ops.attention.tuning import TUNING
from tests.ops.launches import on_hopper

HALF, SINGLE, PACKED = torch.bfloat16, torch.float32, torch.uint8


def task(tokens, kv_heads, width, context, q=HALF, cache=HALF, window=0):
    """A task with pages of 64 slots and tensors without memory."""
    pages = torch.empty(1, kv_heads, 64, width, dtype=cache, device="meta")
    where = (torch.empty(tokens, device="meta") for _ in range(2))
    table = torch.empty(tokens, context // 64, device="meta")
    queries = torch.empty(tokens, 4 * kv_heads, width, dtype=q, device="meta")
    return launch.Task(queries, pages, pages, *where, table, window)


def fill(splits, lines, wave):
    """Fraction of the waves' slots that the programs fill."""
    programs = splits * lines
    return programs / (-(-programs // wave) * wave)


@pytest.mark.parametrize(
    "lines, wave, splits",
    [
        (1, 264, 128),
        (2, 264, 128),
        (16, 264, 16),
        (128, 264, 2),
        (264, 264, 1),
        (32, 132, 4),
        (96, 132, 4),  # One wave would be 0.73 full.
        (112, 132, 1),
        (140, 132, 3),
        (160, 132, 2),
        (180, 132, 2),
        (900, 132, 1),
        (5000, 132, 1),
    ],
)
def test_splits_fill_waves(lines, wave, splits):
    assert whole_waves(lines, wave, 128) == splits


@pytest.mark.parametrize("wave", [132, 264, 396])
@pytest.mark.parametrize("most", [1, 2, 7, 128])
def test_no_splits_fill_fewer_waves_or_more_of_them(wave, most):
    for lines in range(1, 1200):
        splits = whole_waves(lines, wave, most)
        assert 1 <= splits <= most
        waves = -(-splits * lines // wave)
        for other in range(1, most + 1):
            taken = -(-other * lines // wave)
            if taken > max(TUNING.max_waves, -(-lines // wave)):
                break
            if fill(splits, lines, wave) < TUNING.full:
                assert fill(other, lines, wave) <= fill(splits, lines, wave)
            elif taken < waves:
                assert fill(other, lines, wave) < TUNING.full
            elif taken == waves:
                assert other <= splits


@pytest.mark.parametrize(
    "options, splits",
    [
        ({"tokens": 64, "kv_heads": 2, "width": 64, "context": 8192}, 2),
        ({"tokens": 8, "kv_heads": 2, "width": 64, "context": 131072}, 16),
        ({"tokens": 1, "kv_heads": 2, "width": 64, "context": 131072}, 128),
        ({"tokens": 1, "kv_heads": 32, "width": 128, "context": 131072}, 4),
        # Few blocks, plus one where a window begins within a block.
        ({"tokens": 1, "kv_heads": 2, "width": 64, "context": 128}, 3),
        # Less is on the way to each program.
        ({"tokens": 1, "kv_heads": 32, "width": 256, "context": 131072}, 12),
        ({"tokens": 1, "kv_heads": 32, "width": 128, "context": 131072, "q": SINGLE}, 12),
        ({"tokens": 8, "kv_heads": 2, "width": 64, "context": 131072, "cache": PACKED}, 33),
    ],
)
def test_splits_of_a_task(options, splits):
    assert launch._splits(task(**options)) == splits


@pytest.mark.parametrize(
    "rate, narrow, wide", [(3.35e12, 264, 132), (4.8e12, 396, 264), (2.0e12, 264, 132)]
)
def test_more_programs_read_faster_memory(rate, narrow, wide, monkeypatch):
    monkeypatch.setattr(gpu, "memory_rate", lambda device: rate)
    device = torch.device("cpu")
    assert [launch.reading_wave(device, width) for width in (16, 64, 128)] == [narrow, narrow, wide]


def test_windows_are_split_as_they_are_beside_other_work():
    windowed = task(3, 2, 64, 131072, window=65536)
    assert launch._splits(windowed) == launch.splits_of(windowed) == 88
    assert launch.splits_of(task(1, 1, 64, 131072)) == TUNING.max_splits


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize("tokens, kv_heads, merged", [(1, 2, True), (64, 2, True), (132, 2, False)])
def test_splits_and_their_merge_are_launched_early(tokens, kv_heads, merged, monkeypatch):
    split, merge = on_hopper(monkeypatch, launch, "split_kernel", "merge_kernel")
    launch.attend_splits(task(tokens, kv_heads, 64, 8192), HALF)
    assert (split.pdl, merge.pdl) == ([True], [True] * merged)


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "alone", "chunked"),
    [
        *((256, 2, False, True), (255, 2, False, False), (257, 1, False, True)),
        *((256, 1, False, False), (640, 1, False, True), (641, 1, True, True)),
        *((16, 32, False, True), (15, 32, False, False), (1, 512, False, True)),
    ],
)
def test_chunks_make_tiles_before_rows_do(tokens, kv_heads, alone, chunked):
    queries = torch.empty(tokens, kv_heads, 64, device="meta")
    assert launch.in_tiles(queries, kv_heads, False) == alone
    assert launch.in_tiles(queries, kv_heads, True) == chunked


def test_windows_of_wide_heads_are_small_tiles():
    for width, q, window, rows, warps, stages in (
        *((64, HALF, 512, 128, 4, 3), (128, HALF, 512, 64, 4, 2), (256, HALF, 512, 64, 8, 2)),
        *((64, HALF, 0, 128, 4, 3), (128, HALF, 0, 128, 8, 3), (256, HALF, 0, 64, 8, 2)),
        *((64, SINGLE, 512, 64, 4, 2), (128, SINGLE, 0, 64, 4, 2), (256, SINGLE, 0, 32, 4, 2)),
    ):
        options = {"num_warps": warps, "num_stages": stages}
        assert launch.tile(task(600, 4, width, 8192, q, window=window)) == (rows, options)
