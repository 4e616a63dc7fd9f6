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
    gating_output: Tensor,
    table: Tensor,
    tokens: Tensor,
    factor: float = 1.0,
    *,
    shared: int = 0,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Router that looks up a token's experts in a table; their weights are s = sqrt(log(1 + e^x))
    divided by the sum of the chosen s, times factor. In float32.

    Args:
        gating_output: [T, E] float32, bfloat16 or float16.
        table: [V, k] int32.
        tokens: [T] int64, ids of tokens.
        factor: weights are multiplied by it.
        shared: number of shared experts, appended with ids E, E + 1, ...
        shared_gate: [T, 1] of gating_output's dtype; its sigmoid is the weight of shared experts.
            None: their weight is 1.
    Returns:
        Weights [T, k + shared] float32, and ids [T, k + shared] int32.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) a token or expert out of
            range.
    """
    ids = table[tokens]
    x = gating_output.float().gather(1, ids.long())
    weights = routing.divided(torch.nn.functional.softplus(x).sqrt()) * factor
    return routing.with_shared(weights, ids, gating_output.shape[1], shared, shared_gate)


@hash_topk.check
def _(call: Call) -> None:
    expect(NAME, "gating_output", call.gating_output, 2, FLOATS)
    tokens, experts = call.gating_output.shape
    expect(NAME, "table", call.table, 2, INT32, call.gating_output)
    expect(NAME, "tokens", call.tokens, (tokens,), INT64, call.gating_output)
    expect_within(NAME, "tokens", call.tokens, len(call.table))
    expect_within(NAME, "table", call.table, experts)
    routing.expect_shared(NAME, call.shared, call.shared_gate, call.gating_output)


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
    device, gate, slots = call.gating_output.device, call.shared_gate, topk + call.shared
    weights = gpu.empty((tokens, slots), torch.float32, device)
    ids = gpu.empty((tokens, slots), torch.int32, device)
    pdl = uses_pdl(device, tokens, 1)
    if tokens:
        hash_kernel[(tokens,)](
            gating=call.gating_output,
            table=call.table,
            tokens=call.tokens,
            gate=gate,
            weights=weights,
            ids=ids,
            gating_stride=call.gating_output.stride(0),
            gate_stride=0 if gate is None else gate.stride(0),
            experts=experts,
            topk=topk,
            shared=call.shared,
            factor=float(call.factor),
            KP=gpu.next_power_of_2(slots),
            PDL=pdl,
            num_warps=1,
            **pdl_option(pdl),
        )
    return weights, ids
