"""What the projection of a gated delta net gives, taken apart."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, check_least, expect, refuse
from cairn.ops.mamba.sizes import net_of
from cairn.ops.registry import op
from cairn.ops.testing import Arguments, Cases, Make


@op
def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of columns in groups, one for each key head: [q | k | r values | r z] and [r b | r a], r =
    num_heads_v / num_heads_qk.

    Args:
        mixed_qkvz: [T, 2 * num_heads_qk * head_qk + 2 * num_heads_v * head_v] float32, bfloat16 or
            float16.
        mixed_ba: [T, 2 * num_heads_v] of the same.
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
    """`fused_qkvzba_split_reshape_cat` of columns that stand in order: [all q | all k | all values
    | all z] and [all b | all a].

    Args:
        mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v: as there.
    Returns:
        As there.
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
        check_least(name, word, number, 1)
    if heads[1] % heads[0]:
        refuse(name, "num_heads_v", f"is {heads[1]}, not a multiple of {heads[0]}")
    columns = 2 * (heads[0] * dims[0] + heads[1] * dims[1])
    expect(name, "mixed_qkvz", qkvz, (None, columns), FLOATS)
    expect(name, "mixed_ba", ba, (qkvz.shape[0], 2 * heads[1]), FLOATS, qkvz)


@fused_qkvzba_split_reshape_cat.check
def _(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> None:
    name, heads = "fused_qkvzba_split_reshape_cat", (num_heads_qk, num_heads_v)
    _expect(name, mixed_qkvz, mixed_ba, heads, (head_qk, head_v))


@fused_qkvzba_split_reshape_cat_contiguous.check
def _(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> None:
    name, heads = "fused_qkvzba_split_reshape_cat_contiguous", (num_heads_qk, num_heads_v)
    _expect(name, mixed_qkvz, mixed_ba, heads, (head_qk, head_v))


def _drawn(
    make: Make, tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> Arguments:
    columns = 2 * (heads[0] * dims[0] + heads[1] * dims[1])
    mixed = make.randn(tokens, columns, dtype=dtype)
    return make.args(mixed, make.randn(tokens, 2 * heads[1], dtype=dtype), *heads, *dims)


def _cases(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield _drawn(make, 5, (2, 6), (8, 4), dtype)
        yield _drawn(make, 1, (3, 3), (4, 12), dtype)
    yield _drawn(make, 0, (2, 4), (4, 4), torch.float32)


def _points(draw: Draw) -> Points:
    net = net_of(draw)
    heads, dims = (net.key_heads, net.value_heads), (net.key_dim, net.value_dim)
    for tokens in (*net.batches, *net.prefills):
        given = _drawn(draw, tokens, heads, dims, draw.dtype)
        mixed, ba = given.args[:2]
        yield Point(f"{tokens} x {mixed.shape[1]}", given, moved(mixed, mixed, ba, ba))


for _own in (fused_qkvzba_split_reshape_cat, fused_qkvzba_split_reshape_cat_contiguous):
    _own.cases(_cases)
    _own.bench(_points)
