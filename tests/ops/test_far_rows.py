"""Rows more than 2^31 elements apart, on a GPU with enough memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cairn import ops

WIDTH = 4096
ROWS = (1 << 31) // WIDTH + 3
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def far() -> Iterator[Tensor]:
    """[ROWS, WIDTH], zero except in the last rows."""
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GiB on a GPU")
    x = torch.zeros(ROWS, WIDTH, dtype=HALF, device="cuda")
    x[-3:] = torch.randn(3, WIDTH, device="cuda").to(HALF)
    yield x
    del x
    torch.cuda.empty_cache()


def added(x: Tensor) -> Tensor:
    ops.fused_add_rmsnorm(x, x.clone(), torch.ones(WIDTH, dtype=HALF, device="cuda"))
    return x


def normed(x: Tensor) -> Tensor:
    return ops.rmsnorm(x, torch.ones(WIDTH, dtype=HALF, device="cuda"))


def headed(x: Tensor) -> Tensor:
    q, k = (x[:, part].unflatten(1, (-1, 128)) for part in (slice(2048), slice(2048, None)))
    weight = torch.ones(128, dtype=HALF, device="cuda")
    ops.fused_inplace_qknorm(q, k, weight, weight)
    return x


def rotated(x: Tensor) -> Tensor:
    positions = torch.ones(len(x), dtype=torch.int64, device="cuda")
    ops.rotary_embedding(positions, x, None, 128, torch.full((2, 128), 0.5, device="cuda"))
    return x


def taken(x: Tensor) -> Tensor:
    return ops.take_rows(x, torch.arange(len(x), device="cuda"))


def in_four_bits(x: Tensor) -> Tensor:
    return ops.scaled_fp4_quant(x, torch.ones(1, device="cuda"))[0]


CALLS: list[Callable[[Tensor], Tensor]] = [
    normed,
    added,
    headed,
    rotated,
    taken,
    ops.silu_and_mul,
    ops.gelu_quick,
    ops.fp8_quantize,
    in_four_bits,
    ops.hadamard_transform,
]


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=lambda call: getattr(call, "__name__", ""))
def test_far_rows_are_as_near_ones(call: Callable[[Tensor], Tensor], far: Tensor) -> None:
    expected = call(far[-3:].clone()).float()
    whole = call(far.clone())
    assert torch.equal(whole[-3:].float(), expected)
    assert int(whole[:1].float().count_nonzero()) == 0
