"""fp8_quantize and downcast_fp8 against a table of all fp8 values."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.ops import downcast_fp8, fp8_quantize, gpu
from cairn.ops.elementwise.fp8 import downcast_fp8 as downcast_op
from cairn.ops.elementwise.fp8 import fp8_quantize as quantize_op
from tests.ops.sampling.variants import runnable_on

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def decoded(byte: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Value of a positive byte, by the format's definition."""
    bias = (1 << (exponent_bits - 1)) - 1
    exponent, mantissa = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


LEVELS = {
    E4M3: [decoded(byte, 4, 3) for byte in range(0x7F)],
    E5M2: [decoded(byte, 5, 2) for byte in range(0x7C)],
}


def byte_of(number: float, kind: torch.dtype) -> int:
    """Byte of the nearest finite value; ties to even."""
    sign, size = (0x80 if math.copysign(1, number) < 0 else 0), abs(number)
    levels = LEVELS[kind]
    above = min(bisect_left(levels, size), len(levels) - 1)
    below = max(above - 1, 0)
    if size - levels[below] < levels[above] - size:
        return sign | below
    if size - levels[below] > levels[above] - size:
        return sign | above
    return sign | (below if below % 2 == 0 else above)


def awkward(kind: torch.dtype) -> Tensor:
    """Every value of the format, the midpoints, and their neighbours."""
    levels = torch.tensor(LEVELS[kind])
    middles = (levels[1:] + levels[:-1]) / 2
    near = torch.cat([torch.nextafter(middles, middles * s) for s in (0.0, 2.0)])
    beyond = torch.tensor([levels[-1] * 1.01, levels[-1] * 2, 1e30, math.inf])
    found = torch.cat([levels, middles, near, beyond])
    return torch.cat([found, -found])


def of_bytes(x: Tensor) -> list[int]:
    return x.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_rounding(kind: torch.dtype) -> None:
    x = awkward(kind)
    expected = [byte_of(v, kind) for v in x.tolist()]
    assert of_bytes(fp8_quantize(x, fp8_dtype=kind)) == expected
    assert fp8_quantize(torch.tensor([math.nan]), fp8_dtype=kind).isnan().all()


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_rounding_of_the_kernel(kind: torch.dtype) -> None:
    x = torch.cat([awkward(kind), torch.tensor([math.nan])])
    got = quantize_op.using("triton")(x, fp8_dtype=kind)
    assert of_bytes(got[:-1]) == [byte_of(v, kind) for v in x[:-1].tolist()]
    assert got[-1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scale_is_multiplied_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 63) * 100).to(dtype)
    factor = torch.tensor(0.3)
    expected = [byte_of(float(v.float() * factor), E4M3) for v in x.flatten()]
    assert of_bytes(fp8_quantize(x, 0.3)) == expected
    out = torch.empty(7, 63, dtype=E4M3)
    assert fp8_quantize(x, 0.3, out=out) is out
    assert of_bytes(out) == expected


@pytest.mark.parametrize("kind", [torch.uint8, E4M3])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_downcast(kind: torch.dtype, name: str) -> None:
    if name == "triton" and not gpu.INTERPRETED:
        pytest.skip("needs Triton, and a machine without CUDA")
    k, v = torch.randn(3, 2, 5) * 300, torch.randn(3, 2, 5)
    scale = torch.tensor([0.7])
    loc = torch.tensor([2, 0, 3])
    k_out, v_out = (torch.zeros(9, 2, 5, dtype=torch.uint8).view(kind) for _ in range(2))
    downcast_op.using(name)(k, v, k_out, v_out, scale, None, loc, 2, 1)
    inverse = 1 / scale
    for row in range(9):
        token = {5: 0, 1: 1, 7: 2}.get(row)
        if token is None:
            assert set(of_bytes(k_out[row]) + of_bytes(v_out[row])) == {0}
        else:
            expected = [byte_of(float(x), E4M3) for x in (k[token] * inverse).flatten()]
            assert of_bytes(k_out[row]) == expected
            assert of_bytes(v_out[row]) == [byte_of(float(x), E4M3) for x in v[token].flatten()]


@pytest.mark.parametrize("loc", [[-1, 2], [2, -5], [-1, -1]])
def test_a_negative_location_is_not_written(loc: list[int], device: str) -> None:
    k, places = torch.ones(2, 1, 4, device=device), torch.tensor(loc, device=device)
    for name in runnable_on(downcast_op, device):
        memories = [torch.zeros(20, 1, 4, dtype=torch.uint8, device=device) for _ in range(2)]
        # Rows before and after the arguments.
        k_out, v_out = (memory[8:12] for memory in memories)
        downcast_op.using(name)(k, k, k_out, v_out, None, None, places, 1, 1)
        for memory in memories:
            written = memory[:, 0, 0].nonzero().flatten().tolist()
            assert written == ([11] if max(loc) == 2 else []), name


def test_a_scale_may_have_no_dims() -> None:
    k = torch.randn(2, 1, 4)
    outs = [[torch.zeros(2, 1, 4, dtype=E4M3) for _ in range(2)] for _ in range(2)]
    for out, scale in zip(outs, (torch.tensor(0.3), torch.tensor([0.3])), strict=True):
        downcast_fp8(k, k, *out, scale, scale, torch.arange(2))
    assert of_bytes(outs[0][0]) == of_bytes(outs[1][0])


def test_downcast_keeps_what_it_does_not_write() -> None:
    k = torch.randn(1, 1, 4)
    out = [torch.full((3, 1, 4), 77, dtype=torch.uint8) for _ in range(2)]
    downcast_fp8(k, k, *out, None, None, torch.tensor([1]))
    assert out[0][[0, 2]].unique().tolist() == [77]


def test_the_module_has_the_functions_by_the_names_that_peers_have_there() -> None:
    module = ops.elementwise
    assert {"copy_to_gpu_no_ce", "downcast_fp8"} <= set(module.__all__)
    assert all(getattr(module, name) is getattr(ops, name) for name in module.__all__)
