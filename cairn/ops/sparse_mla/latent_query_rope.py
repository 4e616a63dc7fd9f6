"""From the up-projection of query latents to the rotated queries of latent attention and its
indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect, refuse
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.sparse_mla.kernels.prepare import query_kernel
from cairn.ops.sparse_mla.latent_norm_rope import apply_rope

NAME = "latent_query_rope"
WARPS = 4


@op(mutates=("q",))
def latent_query_rope(
    projected: Tensor,
    q: Tensor,
    weights: Tensor | None,
    cos_sin: Tensor,
    index_cos_sin: Tensor | None,
    nope_dim: int,
    factor: float = 1.0,
    interleaved: bool = True,
    index_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate the last dr elements of every head of a row [H heads | Hi heads of the indexer] and
    write them to the end of q's heads; rotate the first dr elements of the indexer's heads. Rounded
    once.

    Args:
        projected: [T, H * (dn + dr) + Hi * D] float32, bfloat16 or float16, rows may be strided.
        q: [T, H, r + dr] of its dtype; the last dr elements of each head are changed.
        weights: [T, Hi] float32, of the indexer's heads; None: no indexer.
        cos_sin, index_cos_sin: [T, dr] float32 = [cos | sin] of each token's angles.
        nope_dim: dn.
        factor: the weights are multiplied by it.
        interleaved, index_interleaved: elements 2i and 2i + 1 are pairs; else i and i + dr / 2.
    Returns:
        (index queries [T, Hi, D], weights * factor [T, Hi]), contiguous; without an indexer [T, 0,
        0] and [T, 0].
    Raises:
        BadArgument: for another shape, dtype or device, or weights without the other arguments of
            the indexer.
    """
    (tokens, heads), rope = q.shape[:2], cos_sin.shape[1]
    own = heads * (nope_dim + rope)
    pe = projected[:, :own].unflatten(1, (heads, -1))[..., nope_dim:]
    q[..., -rope:] = apply_rope(pe, cos_sin, interleaved)
    if weights is None:
        return q.new_empty(tokens, 0, 0), cos_sin.new_empty(tokens, 0)
    assert index_cos_sin is not None
    index = projected[:, own:].unflatten(1, (weights.shape[1], -1))
    return apply_rope(index, index_cos_sin, index_interleaved), weights * factor


@latent_query_rope.check
def _(call: Call) -> None:
    x, q = call.projected, call.q
    expect(NAME, "projected", x, 2, FLOATS, dense=1)
    expect(NAME, "q", q, (len(x), None, None), (x.dtype,), x, 1)
    expect(NAME, "cos_sin", call.cos_sin, (len(x), None), FLOAT32, x, -1)
    heads, rope = q.shape[1], call.cos_sin.shape[1]
    if rope % 2 or not rope < q.shape[2]:
        refuse(NAME, "cos_sin", f"has shape {list(call.cos_sin.shape)}: no pairs of q's last")
    rest = x.shape[1] - heads * (call.nope_dim + rope)
    if call.weights is None:
        if rest or call.nope_dim < 0:
            refuse(NAME, "nope_dim", f"is {call.nope_dim}, but {heads} heads have {x.shape[1]}")
        return
    expect(NAME, "weights", call.weights, (len(x), None), FLOAT32, x, -1)
    expect(NAME, "index_cos_sin", call.index_cos_sin, (len(x), rope), FLOAT32, x, -1)
    own = call.weights.shape[1]
    if not own or call.nope_dim < 0 or rest % own or rest < own * rope:
        refuse(NAME, "projected", f"has shape {list(x.shape)}, not [T, {heads} and {own} heads]")


@latent_query_rope.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor]:
    x, q, weights = call.projected, call.q, call.weights
    (tokens, heads), rope, device = q.shape[:2], call.cos_sin.shape[1], x.device
    own = 0 if weights is None else weights.shape[1]
    width = (x.shape[1] - heads * (call.nope_dim + rope)) // own if own else 0
    index = gpu.empty((tokens, own, width), x.dtype, device)
    scaled = gpu.empty((tokens, own), torch.float32, device)
    parts = 1 if weights is None else 2
    pdl = uses_pdl(device, tokens * parts, WARPS)
    if tokens:
        sizes = (heads, rope, own, width)
        hp, rp, ip, wp = (gpu.next_power_of_2(max(1, size)) for size in sizes)
        query_kernel[(tokens * parts,)](
            x,
            q,
            weights,
            call.cos_sin,
            call.index_cos_sin,
            index,
            scaled,
            x.stride(0),
            q.stride(0),
            q.stride(1),
            call.factor,
            heads,
            hp,
            call.nope_dim,
            q.shape[2] - rope,
            rope,
            rp,
            own,
            ip,
            width,
            wp,
            call.interleaved,
            call.index_interleaved,
            parts,
            pdl,
            num_warps=WARPS,
            **pdl_option(pdl),
        )
    return index, scaled
