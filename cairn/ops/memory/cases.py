"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.memory.set_kv_buffer_kernel import set_kv_buffer_kernel
from cairn.ops.memory.take_rows import BLOCK, take_rows
from cairn.ops.testing import Cases, Make


@set_kv_buffer_kernel.cases
def _(make: Make) -> Cases:
    for dtype, index in ((torch.float32, torch.int64), (torch.bfloat16, torch.int32)):
        caches = make.randn(9, 3, 5, dtype=dtype), make.randn(9, 3, 7, dtype=dtype)
        loc = make.tensor([8, 0, -1, 3], dtype=index)
        k, v = make.randn(4, 3, 5, dtype=dtype), make.randn(4, 6, 7, dtype=dtype)[:, 1:4]
        yield make.args(*caches, loc, k, v)
        yield make.args(*caches, loc[:0], k[:0], v[:0], fallback=True)
    wide = [make.randn(6, 1100) for _ in range(4)]
    yield make.args(*wide[:2], make.tensor([5, 1, 2], torch.int64), wide[2][:3], wide[3][:3])
    bytes_ = [make.randint(0, 120, 7, 64).to(torch.uint8) for _ in range(4)]
    numbers = [x.view(torch.float8_e4m3fn) for x in bytes_]
    yield make.args(*numbers[:2], make.tensor([6, 1], torch.int64), numbers[2][:2], numbers[3][:2])


@take_rows.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield make.args(make.randn(40, 48, dtype=dtype), make.randint(0, 40, 7))
    wide = make.randn(9, 2 * BLOCK + 5)
    yield make.args(wide, make.randint(0, 9, 3).int())
    yield make.args(wide[:, 3 : BLOCK + 6], make.randint(0, 9, 12))
    yield make.args(wide, make.arange(0))
