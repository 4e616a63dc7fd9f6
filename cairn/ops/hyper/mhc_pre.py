"""A block's input from the residual streams (manifold-constrained hyper-connections)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, check_min, expect
from cairn.ops.hyper import launch
from cairn.ops.registry import op

NAME = "mhc_pre"


def mixed(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn [N, n * h] float32 times the concatenated streams [T, n, h] of a token, which are normed
    as one vector: [T, N]."""
    x = streams.flatten(1).float()
    return torch.nn.functional.linear(x, fn) * torch.rsqrt(
        x.square().mean(dim=-1, keepdim=True) + norm_eps
    )


def gathered(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum of the streams [T, n, h] with weights [T, n] float32: [T, h] of their dtype."""
    total = streams[:, 0].float() * weights[:, :1]
    for i in range(1, streams.shape[1]):
        total += streams[:, i].float() * weights[:, i : i + 1]
    return total.to(streams.dtype)


@op
def mhc_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's input from n residual streams, and the coefficients with which its output updates
    them; in float32.

    y = fn u, where u is the concatenation of the streams, divided by its root mean square. With s =
    scale and b = base: pre = sigmoid(s_0 y + b) + eps of the first n numbers, post = 2 sigmoid(s_1
    y + b) of the next n, and of the last n * n, row by row, mix = softmax(s_2 y + b) + eps, its
    columns divided by their sums + eps; after that `iterations` - 1 times its rows, then its
    columns.

    Args:
        streams: [T, n, h] float32, bfloat16 or float16.
        fn: [(2 + n) n, n * h] float32.
        scale: [3] float32.
        base: [(2 + n) n] float32.
        norm_eps: added to the mean square.
        eps: see above.
        iterations: at least 1.
    Returns:
        x [T, h] of the streams' dtype, the sum of pre_i times stream i; post [T, n] float32;
        mix [T, n, n] float32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    count = streams.shape[1]
    y = mixed(streams, fn, norm_eps)
    pre = torch.sigmoid(y[:, :count] * scale[0] + base[:count]) + eps
    post = 2 * torch.sigmoid(y[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    mix = (y[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count))
    mix = mix.softmax(dim=-1) + eps
    mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
    return gathered(streams, pre), post, mix


def check_streams(op: str, streams: Tensor, fn: Tensor, base: Tensor, rows: int) -> None:
    """Raise BadArgument unless streams are [T, n, h], and fn and base have `rows` rows."""
    _, count, hidden = streams.shape
    expect(op, "fn", fn, (rows, count * hidden), FLOAT32, streams)
    expect(op, "base", base, (rows,), FLOAT32, streams)


@mhc_pre.check
def _(call: Call) -> None:
    expect(NAME, "streams", call.streams, 3, FLOATS)
    count = call.streams.shape[1]
    check_streams(NAME, call.streams, call.fn, call.base, (2 + count) * count)
    expect(NAME, "scale", call.scale, (3,), FLOAT32, call.streams)
    check_min(NAME, "iterations", call.iterations, 1)


@mhc_pre.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: launch.fits(call.streams, call.fn, call.scale, call.base),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    eps = call.norm_eps, call.eps
    x, post, mix = launch.gather(call.streams, call.fn, call.scale, call.base, eps, call.iterations)
    assert post is not None and mix is not None
    return x, post, mix


mhc_pre.tolerance(
    {torch.float32: (1e-4, 1e-5)},
    "sums over all streams in another order, of which exponentials are taken",
)
