"""TMA descriptors of caches, and the kernels that read keys through them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import cutlass_mla_decode, tma
from cairn.ops.attention import launch as attention
from cairn.ops.attention.cases import latents
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.tuning import TUNING
from cairn.ops.flash_attn import launch as flash
from cairn.ops.flash_attn.flash_attention import drawn, flash_attention
from cairn.ops.flash_attn.tuning import TUNING as FLASH_ATTN_TUNING
from cairn.ops.testing import Make, check
from tests.ops.tables import Tuned

PAGES, SLOTS, HEADS, WIDTH = 3, 8, 2, 16
LAYOUTS = {
    "slots outside": (PAGES, SLOTS, HEADS, WIDTH),
    "heads outside": (PAGES, HEADS, SLOTS, WIDTH),
    "one page": (1, SLOTS, HEADS, WIDTH),
    "one head": (PAGES, SLOTS, 1, WIDTH),
    "wider lines": (PAGES, SLOTS, HEADS, 2 * WIDTH),
    "every other page": (2 * PAGES, HEADS, SLOTS, WIDTH),
}


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """Tables on every device and for launches of any size, described by a tuple."""
    monkeypatch.setattr(gpu, "supports_tma", lambda device: True)
    monkeypatch.setattr(gpu, "tensor_descriptor", lambda *args: args)
    tuned(TUNING, tma_min_flops=0)


def laid_out(layout: str) -> Tensor:
    """[pages, slots, heads, WIDTH] in a layout, with distinct elements."""
    shape = LAYOUTS[layout]
    tokens = torch.arange(torch.Size(shape).numel()).view(shape).float()
    if shape[1] == HEADS:
        tokens = tokens.transpose(1, 2)
    if layout == "every other page":
        tokens = tokens[::2]
    return tokens[..., -WIDTH:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_holds_the_slots_it_names(layout: str, anywhere: None) -> None:
    tokens, keys = laid_out(layout), 4
    where, _ = tma.lines_of(tokens, tokens, keys, 1.0)
    base, shape, strides, block = where.blocks
    assert block == (keys, WIDTH)
    table = torch.as_strided(base, shape, strides)
    for page in range(tokens.shape[0]):
        for head in range(tokens.shape[2]):
            for slot in range(0, tokens.shape[1], keys):
                line = page * where.page + head * where.head + slot
                column = head * where.column
                got = table[line : line + keys, column : column + WIDTH]
                assert torch.equal(got, tokens[page, slot : slot + keys, head])


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(3, 2, 2, 16),
        torch.zeros(3, 8, 2, 24),
        torch.zeros(3, 8, 2, 8),
        torch.zeros(3, 8, 2, 32)[..., ::2],
        torch.zeros(3, 8, 2, 18)[..., :16],
        torch.zeros(3 * 8 * 2 * 16 + 1)[1:].view(3, 8, 2, 16),
        torch.zeros(0, 8, 2, 16),
        torch.zeros(3, 9 * 24)[:, : 8 * 24].view(3, 8, 24)[:, :, None, :16][:, 1:],
    ],
    ids=[
        *("pages shorter than a block", "a width that is no power of two", "too narrow"),
        "every other number",
        *("lines not aligned", "an address not aligned", "nothing", "short pages of wide lines"),
    ],
)
def test_tensors_without_a_tma_table(tokens: Tensor, anywhere: None) -> None:
    good = torch.zeros(3, 8, 2, 16)
    for pair in ((tokens, good), (good, tokens)):
        assert tma.lines_of(*pair, 8, 1.0) == (tma.NO_LINES, tma.NO_LINES)


def test_a_small_launch_takes_none() -> None:
    tokens = torch.zeros(3, 8, 2, 16)
    assert tma.lines_of(tokens, tokens, 8, 0.0) == (tma.NO_LINES, tma.NO_LINES)


@pytest.mark.parametrize(
    "capability, memory, able",
    [((8, 0), 166_912, False), ((9, 0), 232_448, True), ((12, 0), 101_376, False)],
)
def test_devices_that_copy_blocks(
    capability: tuple[int, int], memory: int, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumer GPUs have TMA, but too little shared memory."""
    monkeypatch.setattr(gpu, "_capability", lambda index: capability)
    monkeypatch.setattr(gpu, "_shared_memory", lambda index: memory)
    assert gpu.supports_tma(torch.device("cuda", 0)) == able


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, device: str, tuned: Tuned) -> list[bool]:
    """Launches of any size may take tables; says of each whether it did."""
    if device == "cpu" and not gpu.INTERPRETED:
        pytest.skip("needs Triton, and a machine without CUDA")
    taken = []
    find = tma.lines_of

    def found(*args: Any) -> tuple[tma.Lines, tma.Lines]:
        result = find(*args)
        taken.append(result[0].blocks is not None)
        return result

    tuned(TUNING, tma_min_flops=0)
    # The package's attribute of this name is the function, not the module.
    latents = import_module("cairn.ops.attention.cutlass_mla_decode")
    for module in (attention, flash, latents):
        monkeypatch.setattr(module, "lines_of", found)
    return taken


def dtype_on(device: str) -> torch.dtype:
    """The interpreter's half-precision products are inexact."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.mark.parametrize("heads, group, width", [(1, 8, 64), (2, 1, 128), (2, 1, 32)])
def test_dense_attention(heads: int, group: int, width: int, device: str, tables: Any) -> None:
    make, dtype = Make(device), dtype_on(device)
    lengths, counts = (330, 9, 200), (60, 2, 30)
    paged = make.paged(lengths, heads, 64, width, dtype=dtype)
    row, slot, _ = paged.queries(counts)
    q = make.randn(sum(counts), heads * group, width, dtype=dtype)
    given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table)
    segments = paged.segments(counts)
    check(dense_attention, "triton_tiles", make.args(*given, segments=segments))
    check(dense_attention, "triton_tiles", make.args(*given, scale=0.1))
    assert tables == [True, True]
    # With a negative scale the maximum of the scaled products is at another position.
    check(dense_attention, "triton_tiles", make.args(*given, scale=-0.1))
    assert len(tables) == 2


@pytest.mark.parametrize(
    "width, layout",
    [
        (64, {"page": 64, "right": 0}),
        (128, {"page": 128}),
        pytest.param(128, {"page": -1, "right": 0}, marks=pytest.mark.slow),
        (64, {"even": True, "pad": 3, "right": 0}),
        (64, {"page": -1, "left": 150, "right": 0, "sinks": True}),
    ],
)
def test_flash_attention(
    width: int, layout: dict[str, Any], device: str, tables: Any, tuned: Tuned
) -> None:
    # Tiles of float32 have half the lines.
    tuned(FLASH_ATTN_TUNING, paired=32 if device == "cpu" else 64)
    if device == "cpu":
        tuned(FLASH_ATTN_TUNING, narrow=128)
    shape = {"queries": (70, 3), "keys": (290, 9), "heads": (4, 2), "widths": (width, width)}
    check(flash_attention, "triton", drawn(Make(device), dtype_on(device), **shape, **layout))
    assert tables == [True]


def test_latents(device: str, tables: Any) -> None:
    make, dtype = Make(device), dtype_on(device)
    for heads, lengths in ((64, [300, 64, 0, 63]), (16, [130])):
        given = latents(make, lengths, heads, 64, (512, 64), dtype)
        check(cutlass_mla_decode, "triton", given)
    assert tables == [True, True]
