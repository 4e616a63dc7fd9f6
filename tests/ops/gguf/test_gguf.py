"""GGUF block formats against the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument, BadConfig
from cairn.ops.gguf import blocks
from cairn.ops.gguf.blocks import KINDS

gguf = pytest.importorskip("gguf")
# NumPy warns about infinite scales in random bytes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")


def random_rows(number: int, rows: int, width: int) -> np.ndarray:
    """Random bytes with finite scales."""
    kind, rng = KINDS[number], np.random.default_rng(number)
    made = rng.integers(0, 256, (rows * width // kind.elements, kind.bytes), dtype=np.uint8)
    for _ in range(100):
        values = gguf.quants.dequantize(made, gguf.GGMLQuantizationType(number))
        bad = ~np.isfinite(values).reshape(len(made), -1).all(1)
        if not bad.any():
            break
        made[bad] = rng.integers(0, 256, (bad.sum(), kind.bytes), dtype=np.uint8)
    return made.reshape(rows, -1)


@pytest.mark.parametrize("number", KINDS)
def test_numbers_are_those_of_the_package(number: int) -> None:
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name == KINDS[number].name
    assert gguf.GGML_QUANT_SIZES[kind] == KINDS[number][1:3]
    rows = random_rows(number, 8, 512)
    wanted = gguf.quants.dequantize(rows, kind)
    got = ops.ggml_dequantize(torch.from_numpy(rows), number, 8, 512, torch.float32)
    assert np.array_equal(got.numpy(), wanted)


@pytest.mark.parametrize("number", [2, 12, 19])
def test_products(number: int) -> None:
    torch.manual_seed(0)
    rows = random_rows(number, 12, 256).reshape(2, 6, -1)
    weight, x = torch.from_numpy(rows), torch.randn(3, 256)
    kind = gguf.GGMLQuantizationType(number)
    value = torch.from_numpy(gguf.quants.dequantize(rows, kind)).double()
    scale = float(value.abs().max())
    wanted = x.double() @ value.transpose(1, 2)
    for product in (ops.ggml_mul_mat_vec_a8, ops.ggml_mul_mat_a8):
        got = product(weight[0], x, number, 6)
        torch.testing.assert_close(got.double(), wanted[0], rtol=1e-5, atol=1e-4 * scale)
    ids = torch.tensor([[1, 0], [0, -1], [1, 1]], dtype=torch.int32)
    of_places = torch.stack([
        wanted[max(expert, 0), place // 2] * (expert >= 0)
        for place, expert in enumerate(ids.flatten().tolist())
    ])  # fmt: skip
    got = ops.ggml_moe_a8_vec(x, weight, ids, 2, number, 6, 3)
    torch.testing.assert_close(got.double(), of_places, rtol=1e-5, atol=1e-4 * scale)
    block = ops.ggml_moe_get_block_size(number)
    assert block == (8 if number < 15 else 0)
    if block:
        order, owners = torch.empty(6 + 3 * 7).int(), torch.empty(4).int()
        used, scratch = torch.empty(1).int(), torch.empty(4).int()
        ops.moe_align_block_size(ids, 3, block, order, owners, used, scratch, True)
        got = ops.ggml_moe_a8(x, weight, order, owners, used, number, 6, 2, 3)
        torch.testing.assert_close(got.double(), of_places, rtol=1e-5, atol=1e-4 * scale)


def test_bad_arguments() -> None:
    weight = torch.zeros(2, 144, dtype=torch.uint8)
    with pytest.raises(BadArgument, match="`quant_type` is 9, not the number of a format"):
        ops.ggml_dequantize(weight, 9, 2, 256)
    with pytest.raises(BadArgument, match="`N` has rows of 100 numbers, not whole blocks of 256"):
        ops.ggml_dequantize(weight, 12, 2, 100)


def test_grids_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks._grid.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gguf.quants", None)
    with pytest.raises(BadConfig, match="IQ1_S need the grids of the package gguf"):
        ops.ggml_dequantize(torch.zeros(50, dtype=torch.uint8), 19, 1, 256)
