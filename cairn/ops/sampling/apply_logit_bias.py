"""Logit bias: per-request additions to single logits."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, INT64, expect
from cairn.ops.registry import op
from cairn.ops.sampling.kernels.adjust import bias_kernel

BLOCK = 128


@op(mutates=("logits",))
def apply_logit_bias(logits: Tensor, index: Tensor, bias: Tensor) -> None:
    """logits[row, token] += bias in place; repeated entries are summed.

    Args:
        logits: [B, V] float32.
        index: [n, 2] int64, (row, token).
        bias: [n] float32; -inf forbids the token.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    logits.index_put_((index[:, 0], index[:, 1]), bias, accumulate=True)


@apply_logit_bias.check
def _(call: Call) -> None:
    name = "apply_logit_bias"
    expect(name, "logits", call.logits, 2, FLOAT32)
    expect(name, "index", call.index, (None, 2), INT64, call.logits)
    expect(name, "bias", call.bias, call.index.shape[:1], FLOAT32, call.logits)


def _entries(call: Call) -> bool:
    return call.logits.stride(1) == 1 and call.index.is_contiguous() and call.bias.is_contiguous()


@apply_logit_bias.implementation("triton", devices=gpu.DEVICES, when=_entries, replayed=True)
def _(call: Call) -> None:
    """One atomic addition per entry; torch's index_put_ sorts the entries."""
    count = len(call.bias)
    if count:
        bias_kernel[(-(-count // BLOCK),)](
            logits=call.logits,
            index=call.index,
            bias=call.bias,
            stride=call.logits.stride(0),
            count=count,
            BLOCK=BLOCK,
            num_warps=BLOCK // 32,
        )
