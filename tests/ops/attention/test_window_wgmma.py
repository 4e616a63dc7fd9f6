"""window_attention by groups of warps: who takes it, and what it gives on the device it is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu, window_attention
from cairn.ops.attention import launch, window_wgmma_launch

needs_groups = pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu.supports_wgmma(torch.device("cuda", 0))),
    reason="needs Hopper's tensor cores and Triton 3.6",
)
HEADS = [
    (16, 2, 64, torch.bfloat16),
    (32, 32, 128, torch.bfloat16),
    (6, 2, 128, torch.float16),
    (3, 3, 64, torch.float16),
]
"""Query heads, KV heads, width: of groups that fill a power of two, and one that does not."""
STEPS = [
    [(0, 300)],
    [(1000, 256)],
    [(333, 777)],
    [(70, 1)],
    [(0, 64), (7, 64), (1000, 3), (63, 1)],
    [(130, 120), (0, 120), (640, 200)],
]
"""First slot and number of slots of every row."""


def drawn(
    steps: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    size: int = 64,
    device: str = "cuda",
) -> tuple[Tensor, ...]:
    """q, caches, row, slot and page table of a step: pages in random order, NaN in landmarks and
    behind the last slot of a row."""
    torch.manual_seed(len(steps) + dim)
    pages = [-(-(first + count) // size) for first, count in steps]
    total = sum(pages) + 2
    caches = torch.randn(2, total, kv_heads, size, dim, device=device).to(dtype)
    caches[:, :, :, size - 1] = torch.nan
    order = torch.randperm(total, device=device).int()
    table = torch.zeros(len(steps), max(pages) + 1, dtype=torch.int32, device=device)
    at = 0
    for row, ((first, count), own) in enumerate(zip(steps, pages, strict=True)):
        table[row, :own] = order[at : at + own]
        caches[:, table[row, own - 1].long(), :, (first + count - 1) % size + 1 :] = torch.nan
        at += own
    row = torch.cat([torch.full((count,), r) for r, (_, count) in enumerate(steps)])
    slot = torch.cat([torch.arange(first, first + count) for first, count in steps])
    q = torch.randn(len(row), heads, dim, device=device).to(dtype)
    return q, caches[0], caches[1], row.to(device), slot.to(device), table


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1.6e-2, atol=1e-2)


@pytest.mark.gpu
@needs_groups
@pytest.mark.parametrize("heads, kv_heads, dim, dtype", HEADS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("window, aligned", [(512, True), (130, True), (100, False)])
def test_the_definition_of_rows_of_any_length(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    steps: list[tuple[int, int]],
    window: int,
    aligned: bool,
) -> None:
    given = drawn(steps, heads, kv_heads, dim, dtype)
    task = launch.Task(*given, window, None, aligned, True)
    assert window_wgmma_launch.fits(task)
    o, lse = window_wgmma_launch.attend(task, dtype)
    wanted = window_attention.reference(*given, window, None, aligned, True)
    near(o, wanted[0])
    torch.testing.assert_close(lse, wanted[1], rtol=1e-4, atol=1e-4)
    again = window_wgmma_launch.attend(task, dtype)
    assert torch.equal(o, again[0])
    assert torch.equal(lse, again[1])


@pytest.mark.gpu
@needs_groups
@pytest.mark.parametrize("heads, kv_heads, dim, dtype", HEADS[1:3])
def test_tokens_in_any_order_and_padding(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    q, k, v, row, slot, table = drawn(STEPS[-1], heads, kv_heads, dim, dtype)
    order = torch.randperm(len(row), device="cuda")
    row, slot = row[order], slot[order]
    slot[17], slot[201:210] = -1, -1
    given = (q, k, v, row, slot, table, 200, 0.3, True, True)
    o, lse = window_wgmma_launch.attend(launch.Task(*given), torch.float32)
    wanted = window_attention.reference(*given)
    near(o, wanted[0])
    assert not o[slot < 0].any()
    assert torch.equal(lse == -torch.inf, wanted[1] == -torch.inf)


@pytest.mark.gpu
@needs_groups
@pytest.mark.parametrize("size", [128, 192])
@pytest.mark.parametrize("masked", [False, True])
def test_pages_of_several_blocks(size: int, masked: bool) -> None:
    q, k, v, *where = drawn([(0, 300), (500, 200)], 8, 4, 64, torch.bfloat16, size)
    if not masked:
        k[:, :, size - 1] = v[:, :, size - 1] = 1.0
    given = (q, k, v, *where, 300, None, True, masked)
    o, _ = window_wgmma_launch.attend(launch.Task(*given), torch.bfloat16)
    near(o, window_attention.reference(*given)[0])


@pytest.mark.parametrize(
    "tokens, heads, dim, taken",
    [(1000, 8, 128, False), (1600, 8, 128, True), (400, 32, 128, True), (4000, 8, 64, False)],
)
def test_wide_heads_in_tiles_for_most_processors(
    tokens: int, heads: int, dim: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_hopper(monkeypatch)
    given = drawn([(0, tokens)], heads, heads, dim, torch.bfloat16, device="cpu")
    task = launch.Task(*given, 512)
    assert window_wgmma_launch.fits(task)
    assert window_wgmma_launch.worthwhile(task) == taken


@pytest.mark.parametrize(
    "change", [{"window": 0}, {"scale": -1.0}, {"dtype": torch.float32}, {"size": 32}, {"dim": 80}]
)
def test_what_is_left_to_others(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_hopper(monkeypatch)
    sizes = {"dim": 64, "dtype": torch.bfloat16, "size": 64} | change
    given = drawn([(0, 100)], 16, 2, sizes["dim"], sizes["dtype"], sizes["size"], "cpu")
    task = launch.Task(*given, change.get("window", 512), change.get("scale"))
    assert not window_wgmma_launch.fits(task)


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(gpu, "processors", lambda device: 132)
