"""Split of the input projections of a gated delta net."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, check_min, expect, refuse
from cairn.ops.mamba.kernels.split import split_kernel
from cairn.ops.mamba.launch import in_order
from cairn.ops.registry import op

BLOCK = 1024
"""Columns per program."""


@op
def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split projections whose columns are grouped by key head, [q | k | r values | r z] and [r b |
    r a] with r = num_heads_v / num_heads_qk.

    Args:
        mixed_qkvz: [T, 2 * num_heads_qk * head_qk + 2 * num_heads_v * head_v] float32, bfloat16 or
            float16.
        mixed_ba: [T, 2 * num_heads_v] of the same dtype.
        num_heads_qk, num_heads_v, head_qk, head_v: heads of keys and of values, and their widths.
    Returns:
        mixed_qkv [T, C], all queries, all keys, all values; z [T, num_heads_v, head_v]; b and a
        [T, num_heads_v].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    tokens, each = mixed_qkvz.shape[0], num_heads_v // num_heads_qk
    sizes = (head_qk, head_qk, each * head_v, each * head_v)
    grouped = mixed_qkvz.unflatten(1, (num_heads_qk, sum(sizes)))
    q, k, v, z = grouped.split(sizes, dim=2)
    mixed_qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    b, a = mixed_ba.unflatten(1, (num_heads_qk, 2 * each)).split((each, each), dim=2)
    return (
        mixed_qkv,
        z.reshape(tokens, num_heads_v, head_v).clone(),
        *(x.reshape(tokens, num_heads_v).clone() for x in (b, a)),
    )


@op
def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fused_qkvzba_split_reshape_cat` for columns that are not grouped: [all q | all k | all
    values | all z] and [all b | all a].

    Args:
        mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v: as in
            `fused_qkvzba_split_reshape_cat`.
    Returns:
        mixed_qkv, z, b and a, as from `fused_qkvzba_split_reshape_cat`.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    channels = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split((channels, num_heads_v * head_v), dim=1)
    b, a = mixed_ba.split((num_heads_v, num_heads_v), dim=1)
    z = z.unflatten(1, (num_heads_v, head_v))
    dense = torch.contiguous_format
    first, second, third, fourth = (x.clone(memory_format=dense) for x in (mixed_qkv, z, b, a))
    return first, second, third, fourth


def _expect(
    name: str, qkvz: Tensor, ba: Tensor, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    words = ("num_heads_qk", "num_heads_v", "head_qk", "head_v")
    for word, number in zip(words, (*heads, *dims), strict=True):
        check_min(name, word, number, 1)
    if heads[1] % heads[0]:
        refuse(name, "num_heads_v", f"is {heads[1]}, not a multiple of {heads[0]}")
    columns = 2 * (heads[0] * dims[0] + heads[1] * dims[1])
    expect(name, "mixed_qkvz", qkvz, (None, columns), FLOATS)
    expect(name, "mixed_ba", ba, (qkvz.shape[0], 2 * heads[1]), FLOATS, qkvz)


@fused_qkvzba_split_reshape_cat.check
def _(call: Call) -> None:
    name, heads = "fused_qkvzba_split_reshape_cat", (call.num_heads_qk, call.num_heads_v)
    _expect(name, call.mixed_qkvz, call.mixed_ba, heads, (call.head_qk, call.head_v))


@fused_qkvzba_split_reshape_cat_contiguous.check
def _(call: Call) -> None:
    name, heads = "fused_qkvzba_split_reshape_cat_contiguous", (call.num_heads_qk, call.num_heads_v)
    _expect(name, call.mixed_qkvz, call.mixed_ba, heads, (call.head_qk, call.head_v))


def _split(call: Call, grouped: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkvz, ba = in_order(call.mixed_qkvz, 1), in_order(call.mixed_ba, 1)
    tokens, heads, keys = len(qkvz), call.num_heads_v, call.num_heads_qk
    channels = 2 * keys * call.head_qk + heads * call.head_v
    shapes = ((channels,), (heads, call.head_v), (heads,), (heads,))
    qkv, z, b, a = (gpu.empty((tokens, *shape), qkvz.dtype, qkvz.device) for shape in shapes)
    parts = -(-(qkvz.shape[1] + ba.shape[1]) // BLOCK)
    if tokens:
        split_kernel[(tokens * parts,)](
            qkvz=qkvz,
            ba=ba,
            qkv=qkv,
            z=z,
            b=b,
            a=a,
            qkvz_stride=qkvz.stride(0),
            ba_stride=ba.stride(0),
            KEYS=keys,
            EACH=heads // keys,
            K=call.head_qk,
            V=call.head_v,
            GROUPED=grouped,
            PROGRAMS=parts,
            BLOCK=BLOCK,
        )
    return qkv, z, b, a


@fused_qkvzba_split_reshape_cat.implementation("triton", devices=gpu.DEVICES)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _split(call, grouped=True)


@fused_qkvzba_split_reshape_cat_contiguous.implementation("triton", devices=gpu.DEVICES)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _split(call, grouped=False)
