"""Root mean square normalisation of whole queries and keys, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.norm.kernels import qknorm_rows_kernel
from cairn.ops.norm.launch import LONGEST, check_weight
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

NAME = "fused_inplace_qknorm_across_heads"


@op(mutates=("q", "k"))
def fused_inplace_qknorm_across_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float = 1e-6,
) -> None:
    """rmsnorm of every row of q and of k, all its heads at once, in place.

    Args:
        q: [T, nq * d] float32, bfloat16 or float16; rows may be strided.
        k: [T, nk * d] of q's dtype.
        q_weight, k_weight: [nq * d], [nk * d], q's dtype or float32.
        eps: added to the mean square.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    q.copy_(rmsnorm.reference(q, q_weight, eps))
    k.copy_(rmsnorm.reference(k, k_weight, eps))


@fused_inplace_qknorm_across_heads.check
def _(call: Call) -> None:
    expect(NAME, "q", call.q, (None, None), FLOATS)
    expect(NAME, "k", call.k, (call.q.shape[0], None), (call.q.dtype,), like=call.q)
    check_weight(NAME, "q_weight", call.q_weight, call.q)
    check_weight(NAME, "k_weight", call.k_weight, call.k)


def _rows(call: Call) -> bool:
    return all(x.stride(1) == 1 and 0 < x.shape[1] <= LONGEST for x in (call.q, call.k))


@fused_inplace_qknorm_across_heads.implementation(
    "triton", devices=gpu.DEVICES, when=_rows, replayed=True
)
def _(call: Call) -> None:
    (tokens, q_width), k_width = call.q.shape, call.k.shape[1]
    blocks = gpu.next_power_of_2(q_width), gpu.next_power_of_2(k_width)
    warps = gpu.warps_for(max(blocks))
    pdl = uses_pdl(call.q.device, tokens, 2 * warps)
    if tokens:
        qknorm_rows_kernel[(2 * tokens,)](
            *(
                call.q,
                call.k,
                call.q_weight,
                call.k_weight,
                call.q.stride(0),
                call.k.stride(0),
                q_width,
                k_width,
                call.eps,
                *blocks,
            ),
            pdl,
            num_warps=warps,
            **pdl_option(pdl),
        )


@fused_inplace_qknorm_across_heads.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = make.randn(5, 96, dtype=dtype), make.randn(5, 33, dtype=dtype)
        yield make.args(q, k, make.randn(96, dtype=dtype), make.randn(33, dtype=dtype))
        joint = make.randn(3, 80, dtype=dtype)
        yield make.args(joint[:, :63], joint[:, 64:], make.randn(63), make.randn(16), 1e-5)
    yield make.args(make.randn(0, 8), make.randn(0, 4), make.randn(8), make.randn(4))


@fused_inplace_qknorm_across_heads.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        q_width, k_width = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        q, k = draw.randn(rows, q_width), draw.randn(rows, k_width)
        yield Point(
            f"{layer.name}: {rows} x {q_width} + {k_width}",
            draw.args(q, k, draw.randn(q_width), draw.randn(k_width)),
            moved(q, q, k, k),
            alternatives=draw.by_torch(fused_inplace_qknorm_across_heads.reference),
        )
