"""Update of the residual streams with a block's output (manifold-constrained hyper-connections)."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect
from cairn.ops.hyper import launch
from cairn.ops.registry import op

NAME = "mhc_post"


@op(mutates=("streams",))
def mhc_post(streams: Tensor, delta: Tensor, post: Tensor, mix: Tensor) -> None:
    """stream k = post_k * delta + sum over j of mix[j, k] * stream j, in float32, rounded once.

    Args:
        streams: [T, n, h] float32, bfloat16 or float16, changed.
        delta: [T, h] of its dtype.
        post: [T, n] float32.
        mix: [T, n, n] float32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    before, added = streams.float().clone(), delta.float()
    for k in range(streams.shape[1]):
        total = added * post[:, k : k + 1]
        for j in range(streams.shape[1]):
            total += before[:, j] * mix[:, j, k : k + 1]
        streams[:, k] = total.to(streams.dtype)


@mhc_post.check
def _(call: Call) -> None:
    expect(NAME, "streams", call.streams, 3, FLOATS)
    tokens, count, hidden = call.streams.shape
    expect(NAME, "delta", call.delta, (tokens, hidden), (call.streams.dtype,), call.streams)
    expect(NAME, "post", call.post, (tokens, count), FLOAT32, call.streams)
    expect(NAME, "mix", call.mix, (tokens, count, count), FLOAT32, call.streams)


@mhc_post.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: launch.fits(call.streams, call.post, call.mix) and call.delta.stride(1) == 1,
    replayed=True,
)
def _(call: Call) -> None:
    launch.enter(call.streams, call.delta, call.post, call.mix)
