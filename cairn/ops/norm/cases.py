"""Test cases shared by norms with the same signature."""

from __future__ import annotations

import torch

from cairn.ops.norm.fused_add_layernorm import fused_add_layernorm
from cairn.ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from cairn.ops.norm.fused_inplace_qknorm import fused_inplace_qknorm
from cairn.ops.norm.fused_inplace_qknorm_across_heads import fused_inplace_qknorm_across_heads
from cairn.ops.norm.fused_rmsnorm_gated import fused_rmsnorm_gated
from cairn.ops.norm.gemma import gemma4_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm
from cairn.ops.norm.l2norm import l2norm
from cairn.ops.norm.layernorm import layernorm
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.norm.rmsnorm_add import rmsnorm_add
from cairn.ops.norm.rmsnorm_hf import rmsnorm_hf
from cairn.ops.testing import Arguments, Cases, Make


def norm_cases(make: Make) -> Cases:
    """Of a norm of rows: (input, weight, eps, out)."""
    yield make.args(make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(1, 4097), make.randn(4097), 1e-5)
    yield make.args(make.randn(0, 16), make.randn(16))
    half = torch.bfloat16
    yield make.args(make.randn(2, 3, 65, dtype=half), make.randn(65, dtype=half), eps=1e-5)
    yield make.args(make.randn(5, 128, dtype=half)[:, :64], make.randn(64))
    yield make.args(make.randn(3, 64, dtype=torch.float16), make.randn(64, dtype=torch.float16))
    yield make.args(make.full((2, 8), 0.0), make.randn(8), out=make.empty(2, 8))
    yield make.args(make.randn(63), make.randn(63), out=make.empty(63, 2)[:, 0])


def sum_cases(make: Make) -> Cases:
    """Of a norm of a sum, both in place: (input, residual, weight, eps)."""
    yield make.args(make.randn(7, 96), make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(0, 16), make.randn(0, 16), make.randn(16))
    yield make.args(make.randn(2, 3, 8), make.randn(2, 3, 8), make.randn(8))
    half = torch.bfloat16
    x, residual = make.randn(3, 65, dtype=half), make.randn(3, 65, dtype=half)
    yield make.args(x, residual, make.randn(65, dtype=half), eps=1e-5)
    x, residual = make.randn(4, 128, dtype=half)[:, :64], make.randn(4, 64, dtype=half)
    yield make.args(x, residual, make.randn(64))


fused_add_rmsnorm.cases(sum_cases)


@fused_inplace_qknorm.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        q_weight, k_weight = make.randn(16, dtype=dtype), make.randn(16, dtype=dtype)
        q, k = make.randn(5, 4, 16, dtype=dtype), make.randn(5, 2, 16, dtype=dtype)
        yield make.args(q, k, q_weight, k_weight)
        joint = make.randn(3, 112, dtype=dtype)
        yield make.args(joint[:, :48], joint[:, 48:80], q_weight, k_weight, 1e-5, head_dim=16)
        q, k = make.randn(1, 33, 24, dtype=dtype), make.randn(1, 1, 24, dtype=dtype)
        yield make.args(q, k, make.randn(24), make.randn(24))
    yield make.args(make.randn(0, 4, 16), make.randn(0, 2, 16), make.randn(16), make.randn(16))


@fused_inplace_qknorm_across_heads.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = make.randn(5, 96, dtype=dtype), make.randn(5, 33, dtype=dtype)
        yield make.args(q, k, make.randn(96, dtype=dtype), make.randn(33, dtype=dtype))
        joint = make.randn(3, 80, dtype=dtype)
        yield make.args(joint[:, :63], joint[:, 64:], make.randn(63), make.randn(16), 1e-5)
    yield make.args(make.randn(0, 8), make.randn(0, 4), make.randn(8), make.randn(4))


gemma_fused_add_rmsnorm.cases(sum_cases)


gemma_rmsnorm.cases(norm_cases)


rmsnorm.cases(norm_cases)


rmsnorm_add.cases(sum_cases)


rmsnorm_hf.cases(norm_cases)


@fused_rmsnorm_gated.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(96), make.randn(7, 96))
    half = torch.bfloat16
    x, gate = (make.randn(2, 3, 65, dtype=half) for _ in range(2))
    yield make.args(x, make.randn(65, dtype=half), gate, 1e-5)
    yield make.args(x[..., :40], make.randn(40), gate[..., :40].float())
    yield make.args(make.randn(0, 16), make.randn(16), make.randn(0, 16))


@gemma4_rmsnorm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(96))
    half = torch.bfloat16
    yield make.args(make.randn(2, 3, 65, dtype=half), make.randn(65, dtype=half), 1e-5, 1.0)
    yield make.args(make.randn(5, 128, dtype=half)[:, :64], make.randn(64), scale_shift=-0.5)
    yield make.args(make.randn(3, 2, 24), make.randn(24), scale_shift=1.0, with_scale=False)
    yield make.args(make.randn(3, 24), None, with_scale=False)
    yield make.args(make.randn(0, 16), make.randn(16))


@l2norm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96))
    yield make.args(make.randn(2, 3, 65, dtype=torch.bfloat16), 1e-5)
    yield make.args(make.full((2, 8), 0.0))
    yield make.args(make.randn(0, 16))


@layernorm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(96), make.randn(96))
    half = torch.bfloat16
    weight, bias = make.randn(65, dtype=half), make.randn(65, dtype=half)
    yield make.args(make.randn(2, 3, 65, dtype=half), weight, bias, 1e-5)
    yield make.args(make.randn(5, 128, dtype=half)[:, :64], make.randn(64), None)
    yield make.args(make.randn(0, 16), make.randn(16), make.randn(16))


@fused_add_layernorm.cases
def _(make: Make) -> Cases:
    for case in sum_cases(make):
        assert isinstance(case, Arguments)
        x, residual, weight = case.args
        yield make.args(x, residual, weight, make.randn(x.shape[-1]), **case.kwargs)
    yield make.args(make.randn(7, 96), make.randn(7, 96), make.randn(96), None, 1e-5)
