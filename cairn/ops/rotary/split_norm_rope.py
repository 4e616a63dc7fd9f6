"""Split of a fused projection into heads, with the norm and the rotation of every head."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.rotary.head_norm_rope import check_angles, rotated
from cairn.ops.rotary.kernels import split_norm_rope_kernel

BLOCK_TOKENS = 256
"""Tokens that the CPU takes through all passes together, so that they stay in its caches."""


@op
def split_norm_rope(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
    means: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and the landmark query z, normed and each head rotated; rounded once at the end.

    A row of `projected` begins with the heads of q, then those of k. z follows them, or is q plus
    `added` (rounded once, before the norm), or does not exist: the number of heads of `weight`
    tells which.

    Args:
        projected: [T, W], rows may be strided.
        added: [T, h_q d]: z is q's projection plus this; None: z, if any, follows k in `projected`.
        weight: [H, d], norm weight of every head of q, k and, where it exists, z.
        cos_sin: [T, d] float32 = [cos | sin] of each token's angles; None: no rotation.
        num_heads, num_kv_heads: h_q, h_kv; H is h_q + h_kv or, always with `added`, 2 h_q + h_kv.
        eps: added to the mean squares.
        whole: all heads of q share one mean square, likewise k and z; otherwise each head has its
            own.
        means: [T, 2 or, with a z, 3] float32, the mean squares of q, k and z, where the norm spans
            heads of other ranks too; None: they are computed here.
    Returns:
        (q [T, h_q, d], k [T, h_kv, d], z [T, h_q or 0, d]), contiguous.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    heads, dim = weight.shape
    counts = (num_heads, num_kv_heads, heads - num_heads - num_kv_heads)
    y = _joint(projected, added, heads, num_heads + num_kv_heads, dim).float()
    mean = y.square().mean(dim=-1, keepdim=True)
    if means is not None:
        mean = means_by_head(means, counts)
    elif whole:
        mean = means_over(mean, counts)
    y = rotated(y * torch.rsqrt(mean + eps) * weight, cos_sin).to(projected.dtype)
    # clone() even where a part is contiguous: results of an op must not share memory.
    q, k, z = (part.clone(memory_format=torch.contiguous_format) for part in y.split(counts, dim=1))
    return q, k, z


def _joint(projected: Tensor, added: Tensor | None, heads: int, own: int, dim: int) -> Tensor:
    """The heads of q, k and z [T, H, d]; the first `own` are those of q and k."""
    if added is None:
        joint = projected[:, : heads * dim]
    else:
        joint = torch.cat(
            (projected[:, : own * dim], added + projected[:, : added.shape[1]]), dim=-1
        )
    return joint.view(-1, heads, dim)


def means_over(mean: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Mean squares [T, H, 1] of heads, where the heads of each group of `counts` share one."""
    return torch.cat(
        [part.mean(dim=1, keepdim=True).expand_as(part) for part in mean.split(counts, dim=1)], 1
    )


def means_by_head(means: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Mean squares [T, H, 1] of heads, given those [T, 2 or 3] of q, k and z."""
    given = zip(means.unbind(1), counts, strict=False)
    return torch.cat([mean.view(-1, 1, 1).expand(-1, count, 1) for mean, count in given], 1)


def check_means(op: str, means: Tensor | None, weight: Tensor, call: Call, kv_heads: int) -> None:
    """Raise BadArgument unless given mean squares have the right shape and dtype."""
    if means is None:
        return
    spans = 2 if len(weight) == call.num_heads + kv_heads else 3
    tokens = call.projected.shape[0]
    expect(op, "means", means, (tokens, spans), (torch.float32,), call.projected, -1)
    if not call.whole:
        refuse(op, "means", "are given, but `whole` is false", "Heads with a norm each have none")


def check_projection(
    op: str,
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    heads: tuple[int, int],
    values: int = 0,
) -> None:
    """Raise BadArgument unless shapes and dtypes of a split are consistent.

    Args:
        op: name of the op, for messages.
        projected, added, weight, cos_sin: as in split_norm_rope.
        heads: h_q, h_kv.
        values: heads after those that are normed.
    """
    expect(op, "projected", projected, 2, FLOATS)
    expect(op, "weight", weight, 2, (projected.dtype, torch.float32), projected)
    (tokens, width), (total, dim), (own, others) = projected.shape, weight.shape, heads
    with_z = 2 * own + others
    if own < 1 or (total != with_z and (total != own + others or added is not None)):
        hint = f"They are those of q, k and, if there is one, z: {own} + {others} ( + {own})"
        refuse(op, "weight", f"has {total} heads", hint)
    if dim % 2:
        refuse(op, "weight", f"has shape {list(weight.shape)}: heads of an odd number of numbers")
    if added is not None:
        expect(op, "added", added, (tokens, own * dim), (projected.dtype,), projected)
        total -= own
    if width < (total + values) * dim:
        wanted = f"{total + values} heads of {dim} or more"
        refuse(op, "projected", f"has {width} columns, not {wanted}")
    check_angles(op, cos_sin, projected, dim)


@split_norm_rope.check
def _(call: Call) -> None:
    heads = call.num_heads, call.num_kv_heads
    check_projection(
        "split_norm_rope", call.projected, call.added, call.weight, call.cos_sin, heads
    )
    check_means("split_norm_rope", call.means, call.weight, call, call.num_kv_heads)


@split_norm_rope.fake
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    tokens, (heads, dim) = call.projected.shape[0], call.weight.shape
    counts = (call.num_heads, call.num_kv_heads, heads - call.num_heads - call.num_kv_heads)
    q, k, z = (call.projected.new_empty(tokens, n, dim) for n in counts)
    return q, k, z


def _accepts(call: Call) -> bool:
    return (
        call.projected.stride(-1) == 1
        and call.weight.is_contiguous()
        and (call.added is None or call.added.stride(-1) == 1)
        and (call.cos_sin is None or call.cos_sin.is_contiguous())
    )


def programs_of(
    weight: Tensor, num_heads: int, kv_heads: int, most: int, whole: bool
) -> tuple[int, int, int]:
    """Programs per token, heads per program and its warps, for the heads of q, k and z of a token;
    at most `most` heads unless q, k and z must stay whole."""
    heads, dim = weight.shape
    if not whole:
        at_once = min(most, gpu.next_power_of_2(heads))
        return -(-heads // at_once), at_once, 4
    at_once = gpu.next_power_of_2(max(num_heads, kv_heads))
    spans = 2 if heads == num_heads + kv_heads else 3
    # Each thread takes 16 bytes of either half.
    return spans, at_once, max(1, gpu.warps_for(at_once * gpu.next_power_of_2(dim)) // 2)


@split_norm_rope.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    tokens, (heads, dim) = call.projected.shape[0], call.weight.shape
    counts = (call.num_heads, call.num_kv_heads, heads - call.num_heads - call.num_kv_heads)
    q, k, z = (
        gpu.empty((tokens, n, dim), call.projected.dtype, call.projected.device) for n in counts
    )
    whole = call.whole and call.means is None
    programs, at_once, warps = programs_of(
        call.weight, call.num_heads, call.num_kv_heads, 16, whole
    )
    pdl = uses_pdl(call.projected.device, tokens, programs * warps)
    if tokens:
        split_norm_rope_kernel[(tokens * programs,)](
            projected=call.projected,
            added=call.projected if call.added is None else call.added,
            weight=call.weight,
            cos_sin=call.projected if call.cos_sin is None else call.cos_sin,
            means=call.projected if call.means is None else call.means,
            q=q,
            k=k,
            z=z,
            row_stride=call.projected.stride(0),
            added_stride=0 if call.added is None else call.added.stride(0),
            eps=call.eps,
            Q_HEADS=call.num_heads,
            KV_HEADS=call.num_kv_heads,
            ALL_HEADS=heads,
            HALF=dim // 2,
            HP=gpu.next_power_of_2(dim // 2),
            PROGRAMS=programs,
            HEADS=at_once,
            WHOLE=whole,
            SPANS=0 if call.means is None else call.means.shape[1],
            ADDED=call.added is not None,
            ROTATED=call.cos_sin is not None,
            PDL=pdl,
            num_warps=warps,
            **pdl_option(pdl),
        )
    return q, k, z


def rotated_heads(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    counts: tuple[int, int, int],
    eps: float,
    whole: bool,
    means: Tensor | None = None,
) -> Tensor:
    """All heads of q, k and z (`counts` heads each), normed and rotated, before rounding: [T, H, d]
    float32."""
    heads, dim = weight.shape
    y = _joint(projected, added, heads, sum(counts[:2]), dim).float()
    if whole:
        if means is None:
            mean = means_over(y.square().mean(dim=-1, keepdim=True), counts)
        else:
            mean = means_by_head(means, counts)
        y = (y * torch.rsqrt(mean + eps)).mul_(weight)
    else:
        y = torch.rms_norm(y, (dim,), None, eps).mul_(weight)
    if cos_sin is None:
        return y
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    halves = y.view(-1, heads, 2, dim // 2)
    rotated: Tensor = halves * cos.unsqueeze(2)
    rotated[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    rotated[:, :, 1].addcmul_(halves[:, :, 0], sin)
    return rotated.flatten(2)


@split_norm_rope.implementation("in_place", devices=("cpu",))
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    counts = (
        call.num_heads,
        call.num_kv_heads,
        call.weight.shape[0] - call.num_heads - call.num_kv_heads,
    )
    tokens, dim = call.projected.shape[0], call.weight.shape[1]
    q, k, z = (call.projected.new_empty(tokens, count, dim) for count in counts)
    for begin in range(0, tokens, BLOCK_TOKENS):
        at = slice(begin, begin + BLOCK_TOKENS)
        given = (call.added, call.cos_sin, call.means)
        up, angles, means = (None if x is None else x[at] for x in given)
        rotated = rotated_heads(
            call.projected[at], up, call.weight, angles, counts, call.eps, call.whole, means
        )
        for target, part in zip((q, k, z), rotated.split(counts, dim=1), strict=True):
            target[at] = part
    return q, k, z
