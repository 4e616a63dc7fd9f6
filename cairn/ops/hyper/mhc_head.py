"""Reduction of a token's residual streams to one vector, at a model's end (hyper-connections)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect
from cairn.ops.hyper import launch
from cairn.ops.hyper.mhc_pre import check_streams, gathered, mhc_pre, mixed
from cairn.ops.registry import op

NAME = "mhc_head"


@op
def mhc_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float
) -> Tensor:
    """Sum over i of (sigmoid(scale y_i + base_i) + eps) * stream i, with y as in `mhc_pre`.

    Args:
        streams: [T, n, h] float32, bfloat16 or float16.
        fn: [n, n * h] float32.
        scale: [1] float32.
        base: [n] float32.
        norm_eps, eps: as in `mhc_pre`.
    Returns:
        [T, h] of the streams' dtype.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    y = mixed(streams, fn, norm_eps)
    return gathered(streams, torch.sigmoid(y * scale + base) + eps)


@mhc_head.check
def _(call: Call) -> None:
    expect(NAME, "streams", call.streams, 3, FLOATS)
    check_streams(NAME, call.streams, call.fn, call.base, call.streams.shape[1])
    expect(NAME, "scale", call.scale, (1,), FLOAT32, call.streams)


@mhc_head.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: launch.fits(call.streams, call.fn, call.scale, call.base),
    replayed=True,
)
def _(call: Call) -> Tensor:
    eps = call.norm_eps, call.eps
    return launch.gather(call.streams, call.fn, call.scale, call.base, eps)[0]


mhc_head.tolerance(mhc_pre.tolerances, mhc_pre.tolerance_reason)
