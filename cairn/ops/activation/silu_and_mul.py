"""The gate of a SwiGLU feed-forward layer (Shazeer 2020, equation 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu
from cairn.ops.activation import launch, loops
from cairn.ops.call import Call
from cairn.ops.cpu import avx512
from cairn.ops.registry import op


@op
def silu_and_mul(
    input: Tensor,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
    expert_ids: Tensor | None = None,
    expert_step: int = 1,
) -> Tensor:
    """silu(input[..., :d]) * input[..., d:], in float32, rounded once.

    Args:
        input: [..., 2d] float32, bfloat16 or float16; rows may be strided.
        out: [..., d] of input's dtype, written and returned if given.
        enable_pdl: ignored.
        expert_ids: [n] int32 or int64; row r is left as it is in `out` (0 without `out`) where
            expert_ids[r // expert_step] is -1. None: every row is written.
        expert_step: rows of one entry of expert_ids.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return launch.gated(torch.nn.functional.silu, input, out, expert_ids, expert_step)


def in_lanes(out: Tensor) -> bool:
    """Whether a loop takes sixteen elements at once of rows that give out [..., d]; it may then
    write where it reads."""
    return avx512.PAIRS and out.dtype == torch.bfloat16 and out.shape[-1] % avx512.LANES == 0


def gate_rows(gates: Tensor, ups: Tensor, first: int, out: Tensor) -> None:
    """out [n, d] = silu of the first d of gates [n, any], times d of ups [n, any] from `first`;
    all contiguous."""
    loop = loops.silu_and_mul_lanes if in_lanes(out) else loops.silu_and_mul
    loop(cpu.as_array(gates), cpu.as_array(ups), first, cpu.as_array(out))


def _dense(call: Call) -> bool:
    return (
        call.input.is_contiguous()
        and call.input.numel() > 0
        and (call.out is None or call.out.is_contiguous())
    )


@silu_and_mul.implementation("numba", devices=cpu.DEVICES, when=_dense)
def _(call: Call) -> Tensor:
    width = call.input.shape[-1] // 2
    result = call.out
    if result is None or call.expert_ids is not None:
        result = call.input.new_empty(*call.input.shape[:-1], width)
    both = call.input.view(-1, 2 * width)
    gate_rows(both, both, width, result.view(-1, width))
    return launch.of_experts(result, call.out, call.expert_ids, call.expert_step)


launch.register(silu_and_mul, "silu")
