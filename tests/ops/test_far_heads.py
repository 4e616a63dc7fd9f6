"""Heads more than 2^31 elements apart: kernels that compute head offsets in 32 bits must refuse
them."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import compare

OPS = {op.name: op for op in all_ops()}
HALF, HEADS, DIM = torch.bfloat16, 6, 16
APART = 1 << 29
"""Numbers from head to head: the fifth is too far for 32 bits."""
SPAN = HEADS * APART * HALF.itemsize


@pytest.fixture(scope="module")
def memory() -> Tensor:
    """Lazily allocated memory around a tensor, so that an overflowing 32-bit offset reads other
    elements instead of crashing."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    whole = torch.frombuffer(mmap.mmap(-1, 2 * SPAN, flags=flags), dtype=HALF)
    return whole[SPAN // HALF.itemsize :]


def numbers(*shape: int) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g).to(HALF)


def far(memory: Tensor, near: Tensor, head: int) -> Tensor:
    """The same elements with the dim `head` outermost in memory."""
    strides = list(near.stride())
    strides[head] = APART
    return memory.as_strided(near.shape, strides).copy_(near)


def qknorm(x: Tensor) -> tuple[Op, list[Tensor | None]]:
    return OPS["fused_inplace_qknorm"], [x, numbers(2, 1, DIM), numbers(DIM), numbers(DIM)]


def rotation(x: Tensor) -> tuple[Op, list[Tensor | int | None]]:
    angles = numbers(9, DIM).float()
    return OPS["rotary_embedding"], [torch.tensor([1, 7]), x, None, DIM, angles]


def norm_and_rotation(x: Tensor) -> tuple[Op, list[Tensor | None]]:
    return OPS["head_norm_rope"], [x, numbers(HEADS, DIM), numbers(2, DIM).float()]


def concatenation(x: Tensor) -> tuple[Op, list[Tensor]]:
    return OPS["concat_mla_k"], [torch.zeros(2, HEADS, DIM + 8, dtype=HALF), x, numbers(2, 1, 8)]


def queries(x: Tensor) -> tuple[Op, list[Tensor]]:
    return OPS["concat_mla_absorb_q"], [x, numbers(2, HEADS, 8)]


def outcome(op: Op, args: list) -> list[Tensor]:
    """Changed arguments and results of a call, by the kernel if it accepts the arguments."""
    result = op.using("triton" if op.accepts("triton", *args) else "reference")(*args)
    return [x for x in (*args, result) if isinstance(x, Tensor)]


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("call", [qknorm, rotation, norm_and_rotation, concatenation, queries])
def test_heads_may_lie_anywhere(call: Callable, memory: Tensor) -> None:
    near = numbers(2, HEADS, DIM)
    op, args = call(far(memory, near, 1))
    for got, wanted in zip(outcome(op, args), outcome(*call(near)), strict=True):
        compare(got, wanted, (1.6e-2, 1e-2), op.name)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_heads_of_a_cache_may_lie_anywhere(memory: Tensor) -> None:
    op, pools = OPS["heads_into_cache"], numbers(2, 3, HEADS, 4, DIM)
    given = numbers(2, 3 * HEADS * DIM), None, numbers(2 * HEADS, DIM), None
    behind = memory[1 << 12 :]
    caches = far(memory, pools[0], 1), far(behind, pools[1], 1)
    rest = torch.tensor([5, 9]), HEADS
    # Each pool has its own offset.
    got = outcome(op, [*given, *caches, *rest])
    for mine, wanted in zip(got, outcome(op, [*given, *pools.clone(), *rest]), strict=True):
        compare(mine, wanted, (1.6e-2, 1e-2), op.name)
