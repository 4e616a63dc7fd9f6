"""Kernels that change logits in place."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def penalties_kernel(
    logits, prompt_mask, output_counts, presence, frequency, repetition,
    stride, mask_stride, count_stride, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """As in `apply_penalties`; one program for a row's block of tokens."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    at = logits + row * stride + token
    logit = tl.load(at, mask=inside, other=0.0)
    count = tl.load(output_counts + row * count_stride + token, mask=inside, other=0)
    generated = count > 0
    seen = tl.load(prompt_mask + row * mask_stride + token, mask=inside, other=0) != 0
    factor = tl.where(seen | generated, tl.load(repetition + row), 1.0)
    logit = tl.where(logit > 0.0, tl.div_rn(logit, factor), logit * factor)
    logit -= tl.load(frequency + row) * count.to(tl.float32)
    logit -= tl.load(presence + row) * generated.to(tl.float32)
    tl.store(at, logit, mask=inside)


@triton.jit
def bias_kernel(logits, index, bias, stride, count, BLOCK: tl.constexpr):
    """logits[index[i, 0], index[i, 1]] += bias[i]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(index + 2 * i, mask=inside, other=0)
    token = tl.load(index + 2 * i + 1, mask=inside, other=0)
    value = tl.load(bias + i, mask=inside, other=0.0)
    tl.atomic_add(logits + row * stride + token, value, mask=inside)
