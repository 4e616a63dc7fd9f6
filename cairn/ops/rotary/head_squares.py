"""Mean squares for query and key norms that span the heads of several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.rotary.kernels import head_squares_kernel


@op
def head_squares(
    projected: Tensor,
    added: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query: bool = False,
    ranks: int = 1,
) -> Tensor:
    """Mean squares of q, k and the landmark query z in a fused projection (as in split_norm_rope),
    divided by `ranks`: their sum over the ranks is the mean square over all heads.

    Args:
        projected: [T, W], rows may be strided.
        added: [T, h_q d]: z is q's projection plus this; None: z, if any, has a projection of its
            own.
        num_heads, num_kv_heads, head_dim: h_q, h_kv and d.
        query: z has h_q heads of its own after those of k; always false with `added`.
        ranks: number of ranks, each with as many heads.
    Returns:
        [T, 2 or, with a z, 3] float32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    q, own = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
    parts = [projected[:, :q], projected[:, q:own]]
    if added is not None:
        parts.append(added + projected[:, :q])
    elif query:
        parts.append(projected[:, own : own + q])
    return torch.stack([part.float().square().mean(-1) for part in parts], 1) / ranks


def _spans(call: Call) -> int:
    return 3 if call.query or call.added is not None else 2


@head_squares.check
def _(call: Call) -> None:
    name, heads = "head_squares", call.num_heads
    expect(name, "projected", call.projected, 2, FLOATS)
    for count in ("num_heads", "num_kv_heads", "head_dim", "ranks"):
        if getattr(call, count) < 1:
            refuse(name, count, f"is {getattr(call, count)}, not 1 or more")
    if call.head_dim % 2:
        refuse(name, "head_dim", f"is {call.head_dim}, an odd number")
    if call.query and call.added is not None:
        refuse(name, "query", "is true beside `added`", "z is one or the other")
    if call.added is not None:
        shape = (call.projected.shape[0], heads * call.head_dim)
        expect(name, "added", call.added, shape, (call.projected.dtype,), call.projected)
    wanted = (heads * (1 + call.query) + call.num_kv_heads) * call.head_dim
    if call.projected.shape[1] < wanted:
        refuse(name, "projected", f"has {call.projected.shape[1]} columns, not {wanted} or more")


@head_squares.fake
def _(call: Call) -> Tensor:
    return call.projected.new_empty(call.projected.shape[0], _spans(call), dtype=torch.float32)


@head_squares.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.projected.stride(-1) == 1 and (call.added is None or call.added.stride(-1) == 1)
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    tokens, spans, device = call.projected.shape[0], _spans(call), call.projected.device
    squares = gpu.empty((tokens, spans), torch.float32, device)
    heads = gpu.next_power_of_2(max(call.num_heads, call.num_kv_heads))
    pairs = gpu.next_power_of_2(call.head_dim // 2)
    warps = max(1, gpu.warps_for(2 * heads * pairs) // 2)
    pdl = uses_pdl(device, tokens, spans * warps)
    if tokens:
        head_squares_kernel[(tokens * spans,)](
            projected=call.projected,
            added=call.projected if call.added is None else call.added,
            squares=squares,
            row_stride=call.projected.stride(0),
            added_stride=0 if call.added is None else call.added.stride(0),
            ranks=call.ranks,
            Q_HEADS=call.num_heads,
            KV_HEADS=call.num_kv_heads,
            ALL_HEADS=call.num_heads * (spans - 1) + call.num_kv_heads,
            HALF=call.head_dim // 2,
            HP=pairs,
            SPANS=spans,
            HEADS=heads,
            ADDED=call.added is not None,
            PDL=pdl,
            num_warps=warps,
            **pdl_option(pdl),
        )
    return squares
