"""Repetition, presence and frequency penalties."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, INT32, expect
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op
from cairn.ops.sampling.arguments import check_parameter
from cairn.ops.sampling.kernels.adjust import penalties_kernel
from cairn.ops.sampling.launch import MAX_ROWS

BLOCK, WARPS, ALIGNED = 512, 4, 32
"""Tokens and warps per program; programs begin at multiples of ALIGNED elements in memory."""
PDL_BLOCK = 256
"""Tokens per program when launched with PDL."""


@op(mutates=("logits",))
def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise logits in place, with vLLM's semantics and order.

    First repetition (Keskar et al. 2019, section 4.1): positive logits of tokens in the prompt or
    the output are divided by it, the other logits of such tokens multiplied. Then, for tokens of
    the output only, logit -= frequency * count + presence * (count > 0), as in OpenAI's API.

    Args:
        logits: [B, V] float32.
        prompt_mask: [B, V] bool, tokens of the prompt.
        output_counts: [B, V] int32, how often each token was generated.
        presence, frequency: [B] float32; 0 does nothing.
        repetition: [B] float32 > 0; 1 does nothing.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    generated = output_counts > 0
    factor = torch.where(prompt_mask | generated, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(frequency[:, None] * output_counts)
    logits.sub_(presence[:, None] * generated)


@apply_penalties.check
def _(call: Call) -> None:
    name = "apply_penalties"
    expect(name, "logits", call.logits, 2, FLOAT32)
    expect(name, "prompt_mask", call.prompt_mask, call.logits.shape, (torch.bool,), call.logits)
    expect(name, "output_counts", call.output_counts, call.logits.shape, INT32, call.logits)
    check_parameter(name, "presence", call.presence, call.logits, FLOAT32)
    check_parameter(name, "frequency", call.frequency, call.logits, FLOAT32)
    check_parameter(name, "repetition", call.repetition, call.logits, FLOAT32)


def _lines(call: Call) -> bool:
    rows = (call.logits, call.prompt_mask, call.output_counts)
    single = (call.presence, call.frequency, call.repetition)
    near = all(t.stride(1) == 1 for t in rows) and all(t.is_contiguous() for t in single)
    return near and len(call.logits) <= MAX_ROWS


@apply_penalties.implementation("triton", devices=gpu.DEVICES, when=_lines, replayed=True)
def _(call: Call) -> None:
    rows, width = call.logits.shape
    if rows and width:
        strides = (call.logits.stride(0), call.prompt_mask.stride(0), call.output_counts.stride(0))
        # All three tensors have the same alignment offset in a row: align to the gcd of the
        # differences of their strides.
        align = math.gcd(ALIGNED, *(stride - strides[0] for stride in strides))
        longest = width + align - 1
        pdl = uses_pdl(call.logits.device, rows, -(-longest // PDL_BLOCK) * WARPS)
        block = PDL_BLOCK if pdl else BLOCK
        blocks = -(-longest // block)
        penalties_kernel[(blocks, rows)](
            **call.asdict(),
            stride=strides[0],
            mask_stride=strides[1],
            count_stride=strides[2],
            width=width,
            BLOCK=block,
            ALIGN=align,
            PDL=pdl,
            num_warps=WARPS,
        )
