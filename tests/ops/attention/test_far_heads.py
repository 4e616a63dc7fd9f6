"""Head-major caches whose heads are more than 2^31 elements apart: 32-bit offsets would
overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.landmark.landmark_attention import landmark_attention
from cairn.ops.landmark.mean_summary import mean_summary
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.prior_summary import prior_summary
from cairn.ops.landmark.select_launch import accepts

HEADS, SIZE, DIM = 3, 256, 256
PAGES = (1 << 30) // (SIZE * DIM) + 3
Call = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""An op of a cache and a page table."""


def calls() -> dict[str, Call]:
    row, slot = torch.tensor([0, 0]), torch.tensor([SIZE + 40, SIZE + 41])
    q, weights = torch.randn(2, 2 * HEADS, DIM), torch.rand(2, 2 * HEADS, 2)
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(2, HEADS, 2).contiguous()

    def whole(name: str) -> Call:
        return lambda x, table: dense_attention.using(name)(q, x, x, row, slot, table)

    def window(name: str) -> Call:
        return lambda x, table: window_attention.using(name)(q, x, x, row, slot, table, SIZE)

    def pages(name: str) -> Call:
        return lambda x, table: (page_attention.using(name)(q, x, x, row, table, indices, weights),)

    def layer(x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        key = torch.ones(1, 1, DIM).expand(len(x), 2 * HEADS, DIM)
        given = (q, q, x, x, key, None, row, slot, table, 30, 2, True)
        return landmark_attention.using("triton_few")(*given)

    return {
        "splits": window("triton_splits"),
        "tiles": whole("triton_tiles"),
        "layer": layer,
        "few pages": pages("triton_few"),
        "sorted pages": pages("triton_sorted"),
        "prior": lambda x, table: prior_summary.using("triton")(q, x, table[0].long()),
        "mean": lambda x, table: (mean_summary.using("triton")(x, table[0].long()),),
    }


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("name", calls())
def test_pages_of_heads_far_away(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    call, near = calls()[name], torch.randn(2, HEADS, SIZE, DIM)
    file, numbers = tmp_path / "cache", HEADS * PAGES * SIZE * DIM
    # A sparse file: most of it takes no memory.
    with file.open("wb") as empty:
        empty.truncate(4 * numbers)
    memory = torch.from_file(str(file), shared=True, size=numbers)
    far = memory.view(HEADS, PAGES, SIZE, DIM).transpose(0, 1)
    table = torch.tensor([[PAGES - 1, PAGES - 3]], dtype=torch.int32)
    far[table[0].long()] = near
    wanted = call(near, torch.tensor([[0, 1]], dtype=torch.int32))
    for got, expected in zip(call(far, table), wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_summaries_so_far_apart_are_left_to_others() -> None:
    z, table = torch.empty(1, 64, 128, device="meta"), torch.empty(1, 50, device="meta")
    for pages, taken in ((1 << 17, True), (1 << 18, False)):
        by_page = torch.empty(pages, 64, 128, device="meta")
        by_head = torch.empty(64, pages, 128, device="meta").transpose(0, 1)
        assert accepts(z, by_page, table, 8, 32)
        assert accepts(z, by_head, table, 8, 32) == taken
