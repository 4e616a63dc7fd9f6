"""From the down-projection of a token to its query latent, cached latent and rotary key, and index
key."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect, refuse
from cairn.ops.norm.layernorm import layernorm
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.rotary.launch import rotate
from cairn.ops.sparse_mla.kernels.prepare import latent_kernel

NAME = "latent_norm_rope"
WARPS = 4


@op
def latent_norm_rope(
    projected: Tensor,
    key: Tensor | None,
    q_weight: Tensor,
    kv_weight: Tensor,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    cos_sin: Tensor,
    index_cos_sin: Tensor | None,
    eps: float = 1e-6,
    key_eps: float = 1e-6,
    interleaved: bool = True,
    index_interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm both latents of a row [q latent | latent | rotary key] and rotate its rotary key; layer
    norm an index key and rotate its first dr elements. Each result is rounded once, the index key
    also after its norm.

    Args:
        projected: [T, rq + r + dr] float32, bfloat16 or float16, rows may be strided.
        key: [T, D] of its dtype, rows may be strided; None: no indexer.
        q_weight, kv_weight: [rq], [r], weights of the norms, of its dtype or float32.
        k_weight, k_bias: [D], of the layer norm; None without key.
        cos_sin, index_cos_sin: [T, dr] float32 = [cos | sin] of each token's angles.
        eps, key_eps: added to the mean squares and to the variance.
        interleaved, index_interleaved: elements 2i and 2i + 1 are pairs; else i and i + dr / 2.
    Returns:
        (q latent [T, rq], latent [T, r], rotary key [T, dr], index key [T, D], or [T, 0] without
        one), contiguous.
    Raises:
        BadArgument: for another shape, dtype or device, or a key without the other arguments of the
            indexer.
    """
    widths = (len(q_weight), len(kv_weight), cos_sin.shape[1])
    q_latent, latent, pe = projected.split(widths, dim=1)
    own = projected.new_empty(len(projected), 0)
    if key is not None:
        assert k_weight is not None and index_cos_sin is not None
        normed = layernorm.reference(key, k_weight, k_bias, key_eps)
        own = apply_rope(normed, index_cos_sin, index_interleaved)
    first = rmsnorm.reference(q_latent, q_weight, eps)
    second = rmsnorm.reference(latent, kv_weight, eps)
    return first, second, apply_rope(pe, cos_sin, interleaved), own


def apply_rope(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """A copy of heads [T, ..., D] with their first dims rotated."""
    own = x.contiguous().clone()
    cos, sin = cos_sin.chunk(2, dim=-1)
    rotate(own, cos, sin, x.shape[-1], not interleaved)
    return own


@latent_norm_rope.check
def _(call: Call) -> None:
    x, rope = call.projected, call.cos_sin.shape[-1]
    expect(NAME, "projected", x, 2, FLOATS, dense=1)
    for name, weight in (("q_weight", call.q_weight), ("kv_weight", call.kv_weight)):
        expect(NAME, name, weight, 1, (x.dtype, torch.float32), x)
    width = len(call.q_weight) + len(call.kv_weight) + rope
    expect(NAME, "projected", x, (None, width))
    expect(NAME, "cos_sin", call.cos_sin, (len(x), None), FLOAT32, x, -1)
    if rope % 2:
        refuse(NAME, "cos_sin", f"has shape {list(call.cos_sin.shape)}: no pairs")
    if call.key is None:
        return
    expect(NAME, "key", call.key, (len(x), None), (x.dtype,), x, 1)
    for name, weight in (("k_weight", call.k_weight), ("k_bias", call.k_bias)):
        expect(NAME, name, weight, call.key.shape[1:], (x.dtype, torch.float32), x)
    expect(NAME, "index_cos_sin", call.index_cos_sin, (len(x), rope), FLOAT32, x, -1)
    if call.key.shape[1] < rope:
        refuse(NAME, "key", f"has {call.key.shape[1]} numbers, fewer than the {rope} that turn")


@latent_norm_rope.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, key, device, dtype = call.projected, call.key, call.projected.device, call.projected.dtype
    tokens, rope = len(x), call.cos_sin.shape[1]
    width = 0 if key is None else key.shape[1]
    sizes = (len(call.q_weight), len(call.kv_weight), rope, width)
    results = tuple(gpu.empty((tokens, size), dtype, device) for size in sizes)
    parts = 2 if key is None else 3
    pdl = uses_pdl(device, tokens * parts, WARPS)
    if tokens:
        padded = [number for size in sizes for number in (size, gpu.next_power_of_2(max(1, size)))]
        latent_kernel[(tokens * parts,)](
            x,
            key,
            call.q_weight,
            call.kv_weight,
            call.k_weight,
            call.k_bias,
            call.cos_sin,
            call.index_cos_sin,
            *results,
            x.stride(0),
            0 if key is None else key.stride(0),
            call.eps,
            call.key_eps,
            *padded,
            call.interleaved,
            call.index_interleaved,
            parts,
            pdl,
            num_warps=WARPS,
            **pdl_option(pdl),
        )
    first, second, pe, own = results
    return first, second, pe, own


latent_norm_rope.tolerance(
    {torch.float32: (2e-5, 1e-5), torch.bfloat16: (1.6e-2, 2e-2)},
    "a sum of squares in another order decides the last bit before a rotation adds two numbers",
)
