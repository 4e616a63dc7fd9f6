"""Root mean square normalisation of whole queries and keys, in place."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.norm.kernels import qknorm_rows_kernel
from cairn.ops.norm.launch import LONGEST, check_weight
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

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
            q=call.q,
            k=call.k,
            q_weight=call.q_weight,
            k_weight=call.k_weight,
            q_stride=call.q.stride(0),
            k_stride=call.k.stride(0),
            q_width=q_width,
            k_width=k_width,
            eps=call.eps,
            Q_BLOCK=blocks[0],
            K_BLOCK=blocks[1],
            PDL=pdl,
            num_warps=warps,
        )
