"""Per-request additions to single logits."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, INT64, expect
from cairn.ops.registry import op
from cairn.ops.sampling.kernels.adjust import bias_kernel
from cairn.ops.testing import Cases, Make

BLOCK = 128


@op(mutates=("logits",))
def apply_logit_bias(logits: Tensor, index: Tensor, bias: Tensor) -> None:
    """logits[row, token] += bias in place; entries that name the same place add up.

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
    """One atomic addition for each entry, where torch sorts them."""
    count = len(call.bias)
    if count:
        bias_kernel[(-(-count // BLOCK),)](
            *(call.logits, call.index, call.bias, call.logits.stride(0), count, BLOCK),
            num_warps=BLOCK // 32,
        )


@apply_logit_bias.cases
def _(make: Make) -> Cases:
    index = make.tensor([[0, 3], [2, 0], [2, 6], [0, 3]], dtype=torch.int64)
    yield make.args(make.randn(3, 7), index, make.tensor([1.5, -100.0, float("-inf"), 0.25]))
    yield make.args(make.randn(2, 5), index[:0], make.randn(0))


@apply_logit_bias.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits, bias = draw.randn(rows, vocabulary, dtype=torch.float32), draw.rand(4 * rows)
        tokens = draw.randint(0, vocabulary, 4 * rows)
        index = torch.stack((torch.arange(4 * rows, device=tokens.device) // 4, tokens), dim=1)
        yield Point(
            f"{4 * rows} of {rows} x {vocabulary}",
            draw.args(logits, index, bias),
            moved(index, bias, bias, bias),
            alternatives=draw.by_torch(apply_logit_bias.reference),
        )
