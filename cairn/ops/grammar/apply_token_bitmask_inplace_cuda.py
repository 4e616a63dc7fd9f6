"""Masks of grammars: forbid tokens by single bits (the layout of XGrammar's masks)."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.grammar.kernels import bitmask_kernel
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

NAME = "apply_token_bitmask_inplace_cuda"
BITS = 32
BLOCK, WARPS, ALIGNED = 1024, 8, 32
"""Tokens and warps of a program, which begins at a line of memory."""
PDL_BLOCK, PDL_WARPS = 512, 4
"""Tokens and warps when launched with PDL."""


@op(mutates=("logits",))
def mask_tokens(logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> None:
    """`apply_token_bitmask_inplace_cuda` with its row indices as a tensor.

    Args:
        logits, bitmask: as in `apply_token_bitmask_inplace_cuda`.
        indices: [n] int32 or int64; None: all rows.
    """
    logits, bitmask = (x.unsqueeze(0) if x.dim() == 1 else x for x in (logits, bitmask))
    rows = None if indices is None else indices.long()
    part, words = (logits, bitmask) if rows is None else (logits[rows], bitmask[rows])
    shifts = torch.arange(BITS, dtype=torch.int32, device=bitmask.device)
    forbidden = ((words[..., None] >> shifts) & 1).flatten(1) == 0
    width = min(logits.shape[1], forbidden.shape[1])
    part[:, :width].masked_fill_(forbidden[:, :width], -torch.inf)
    if rows is not None:
        logits[rows] = part


@mask_tokens.front(replayed=True)
def apply_token_bitmask_inplace_cuda(
    logits: Tensor, bitmask: Tensor, indices: Tensor | Sequence[int] | None = None
) -> None:
    """logits[row, token] = -inf in place where the token's bit is 0, on any device.

    Token t is allowed by bit t % 32 of word t // 32. Tokens beyond the words and bits beyond the
    tokens are left alone.

    Args:
        logits: [V] or [B, V] float32, bfloat16 or float16.
        bitmask: [W] or [B, W] int32, W usually ceil(V / 32); with indices more or fewer rows.
        indices: the rows (of both) that are masked, none twice: numbers, or [n] int32 or int64 on
            any device; None: all.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for an index of no row.
    """
    expect(NAME, "logits", logits)
    if indices is not None and not isinstance(indices, Tensor):
        try:
            indices = torch.tensor(indices, dtype=torch.int32, device="cpu")
        except (TypeError, ValueError):
            refuse(NAME, "indices", f"is {reprlib.repr(indices)}, neither numbers nor a tensor")
    mask_tokens(logits, bitmask, None if indices is None else indices.to(logits.device))


@mask_tokens.check
def _(call: Call) -> None:
    expect(NAME, "logits", call.logits, dtypes=FLOATS)
    expect(NAME, "bitmask", call.bitmask, dtypes=(torch.int32,), like=call.logits)
    for argument, value in (("logits", call.logits), ("bitmask", call.bitmask)):
        if value.dim() not in (1, 2):
            refuse(NAME, argument, f"has shape {list(value.shape)}, not [any] or [any, any]")
    rows, lines = (x.shape[0] if x.dim() == 2 else 1 for x in (call.logits, call.bitmask))
    if rows != lines and (call.indices is None or call.logits.dim() != call.bitmask.dim()):
        refuse(NAME, "bitmask", f"has {lines} rows, logits {rows}")
    if call.indices is not None:
        expect(NAME, "indices", call.indices, (None,), INDICES, like=call.logits)
        expect_within(NAME, "indices", call.indices, min(rows, lines))


def _lines(call: Call) -> bool:
    near = call.logits.stride(-1) == 1 and call.bitmask.stride(-1) == 1
    return near and (call.indices is None or call.indices.is_contiguous())


@mask_tokens.implementation("triton", devices=gpu.DEVICES, when=_lines, replayed=True)
def _(call: Call) -> None:
    width = min(call.logits.shape[-1], BITS * call.bitmask.shape[-1])
    rows = call.logits.shape[0] if call.logits.dim() == 2 else 1
    if call.indices is not None:
        rows = call.indices.shape[0]
    if rows and width:
        # Without a batch dimension there is only row 0, so the strides do not matter.
        strides = (
            (call.logits.stride(0), call.bitmask.stride(0))
            if call.logits.dim() == call.bitmask.dim()
            else (0, 0)
        )
        longest = width + ALIGNED - 1
        pdl = uses_pdl(call.logits.device, rows, -(-longest // PDL_BLOCK) * PDL_WARPS)
        block, warps = (PDL_BLOCK, PDL_WARPS) if pdl else (BLOCK, WARPS)
        blocks = -(-longest // block)
        bitmask_kernel[(rows * blocks,)](
            logits=call.logits,
            bitmask=call.bitmask,
            indices=call.indices,
            stride=strides[0],
            mask_stride=strides[1],
            width=width,
            BLOCKS=blocks,
            BLOCK=block,
            ALIGN=ALIGNED,
            PDL=pdl,
            num_warps=warps,
        )
