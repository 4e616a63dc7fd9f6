"""Cases that gated activations share."""

from __future__ import annotations

import torch

from cairn.ops.activation.gelu_and_mul import gelu_and_mul
from cairn.ops.activation.gelu_quick import gelu_quick
from cairn.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from cairn.ops.activation.sigmoid_gate_mul import sigmoid_gate_mul
from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.activation.silu_and_mul_clamp import silu_and_mul_clamp
from cairn.ops.testing import Cases, Make


def gated_cases(make: Make) -> Cases:
    """(input, out, expert_ids, expert_step)."""
    yield make.args(make.randn(7, 2 * 96))
    yield make.args(make.randn(1, 2 * 4097, dtype=torch.bfloat16))
    yield make.args(make.randn(5, 2 * 48, dtype=torch.bfloat16, scale=30.0))
    yield make.args(make.randn(2, 3, 2 * 5, dtype=torch.float16))
    yield make.args(make.randn(0, 8))
    for scale in (3.0, 30.0):
        yield make.args(make.randn(4, 64, scale=scale)[:, :40], out=make.empty(4, 20))
    ids = make.tensor([3, -1, 0], dtype=torch.int32)
    yield make.args(make.randn(5, 14), expert_ids=ids.abs(), expert_step=2)
    yield make.args(make.randn(3, 10), out=make.randn(3, 5), expert_ids=ids)
    yield make.args(make.randn(3, 10), out=make.randn(5, 3).T, expert_ids=ids)


gelu_and_mul.cases(gated_cases)


@gelu_quick.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96))
    yield make.args(make.randn(1, 4097, dtype=torch.bfloat16))
    yield make.args(make.randn(2, 3, 5, dtype=torch.float16))
    yield make.args(make.randn(0, 8))
    yield make.args(make.randn(4, 64, scale=30.0)[:, :40], out=make.empty(4, 40))


gelu_tanh_and_mul.cases(gated_cases)


silu_and_mul.cases(gated_cases)


@silu_and_mul_clamp.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(7, 2 * 96, dtype=dtype, scale=3.0), 2.5)
        yield make.args(make.randn(2, 3, 2 * 5, dtype=dtype), 0.5)
    yield make.args(make.randn(0, 8), 10.0)


@sigmoid_gate_mul.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        both = make.randn(3, 4 * 2 * 24 + 5, dtype=dtype, scale=5.0)[:, : 4 * 2 * 24]
        gate = both.unflatten(1, (4, 2, 24))[:, :, 1]
        yield make.args(make.randn(3, 4, 24, dtype=dtype), gate)
        yield make.args(make.randn(1, 9, 128, dtype=dtype), make.randn(1, 9, 128, dtype=dtype))
    yield make.args(make.randn(0, 2, 8), make.randn(0, 2, 8))
