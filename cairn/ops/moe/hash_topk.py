"""The experts of a router whose choice is a table by token id (hash layers: Roller et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, INT64, expect, expect_within
from cairn.ops.moe import routing
from cairn.ops.moe.kernels.routing import hash_kernel
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op

NAME = "hash_topk"


@op
def hash_topk(
    gating_output: Tensor, table: Tensor, tokens: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The experts in a token's row of the table; their weights are sqrt(log(1 + e^x)) over the sum
    of these, times factor. In float32.

    Args:
        gating_output: [T, E] float32, bfloat16 or float16.
        table: [V, k] int32.
        tokens: [T] int64, ids of tokens.
        factor: of the weights.
    Returns:
        Weights [T, k] float32, and ids [T, k] int32.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) a token beyond the table or
            an expert that there is not.
    """
    ids = table[tokens]
    x = gating_output.float().gather(1, ids.long())
    return routing.divided(torch.nn.functional.softplus(x).sqrt()) * factor, ids


@hash_topk.check
def _(call: Call) -> None:
    expect(NAME, "gating_output", call.gating_output, 2, FLOATS)
    tokens, experts = call.gating_output.shape
    expect(NAME, "table", call.table, 2, INT32, call.gating_output)
    expect(NAME, "tokens", call.tokens, (tokens,), INT64, call.gating_output)
    expect_within(NAME, "tokens", call.tokens, len(call.table))
    expect_within(NAME, "table", call.table, experts)


@hash_topk.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.gating_output.stride(1) == 1
        and call.table.is_contiguous()
        and call.tokens.is_contiguous()
    ),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    (tokens, experts), topk = call.gating_output.shape, call.table.shape[1]
    device = call.gating_output.device
    weights = gpu.empty((tokens, topk), torch.float32, device)
    ids = gpu.empty((tokens, topk), torch.int32, device)
    pdl = uses_pdl(device, tokens, 1)
    if tokens:
        hash_kernel[(tokens,)](
            gating=call.gating_output,
            table=call.table,
            tokens=call.tokens,
            weights=weights,
            ids=ids,
            gating_stride=call.gating_output.stride(0),
            experts=experts,
            topk=topk,
            factor=float(call.factor),
            KP=gpu.next_power_of_2(topk),
            PDL=pdl,
            num_warps=1,
            **pdl_option(pdl),
        )
    return weights, ids
