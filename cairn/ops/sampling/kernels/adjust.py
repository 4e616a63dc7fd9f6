"""Kernels that change logits in place."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous
from cairn.ops.sampling.kernels.blocks import aligned_block


@triton.jit
def penalise(
    logits, prompt_mask, output_counts, presence, frequency, repetition, token, width,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Tokens [N] of one row, at addresses; WHOLE: all lie inside."""
    inside = None if WHOLE else (token >= 0) & (token < width)
    logit = tl.load(logits, mask=inside)
    count = tl.load(output_counts, mask=inside)
    generated = count > 0
    seen = tl.load(prompt_mask, mask=inside) != 0
    # The product in float64 rounds to the same float32 as the quotient, unless that is subnormal:
    # no quotient of two float32 is that close to a midpoint. A division each would be
    # compute-bound.
    inverse = 1.0 / repetition.to(tl.float64)
    quotient = (logit.to(tl.float64) * inverse).to(tl.float32)
    changed = tl.where(logit > 0.0, quotient, logit * repetition)
    logit = tl.where(seen | generated, changed, logit)
    logit -= frequency * count.to(tl.float32)
    logit -= presence * generated.to(tl.float32)
    tl.store(logits, logit, mask=inside)


@triton.jit(early=())
def penalties_kernel(
    logits, prompt_mask, output_counts, presence, frequency, repetition,
    stride, mask_stride, count_stride, width,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As in `apply_penalties`; one program for a row's block of tokens. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    at, begin, whole = aligned_block(row * stride, block, width, BLOCK, ALIGN)
    of_mask, _, _ = aligned_block(row * mask_stride, block, width, BLOCK, ALIGN)
    of_count, _, _ = aligned_block(row * count_stride, block, width, BLOCK, ALIGN)
    i = tl.arange(0, BLOCK)
    token = begin + i
    logits += at + i
    prompt_mask += of_mask + i
    output_counts += of_count + i
    by_presence = tl.load(presence + row)
    by_frequency = tl.load(frequency + row)
    by_repetition = tl.load(repetition + row)
    if whole:
        penalise(
            logits, prompt_mask, output_counts, by_presence, by_frequency, by_repetition,
            token, width, True,
        )  # fmt: skip
    else:
        penalise(
            logits, prompt_mask, output_counts, by_presence, by_frequency, by_repetition,
            token, width, False,
        )  # fmt: skip


@triton.jit
def bias_kernel(logits, index, bias, stride, count, BLOCK: tl.constexpr):
    """logits[index[i, 0], index[i, 1]] += bias[i]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(index + 2 * i, mask=inside, other=0)
    token = tl.load(index + 2 * i + 1, mask=inside, other=0)
    value = tl.load(bias + i, mask=inside, other=0.0)
    tl.atomic_add(logits + row * stride + token, value, mask=inside, sem="relaxed")
