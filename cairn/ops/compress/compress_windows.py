"""Entries of windows of tokens (DeepSeek-V4's compressor)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import (
    FLOAT32,
    FLOATS,
    INT64,
    check_dtype,
    check_rows,
    expect,
    expect_within,
    refuse,
)
from cairn.ops.compress.kernels import compress_kernel
from cairn.ops.compress.norm_rope_tail import norm_rope_tail
from cairn.ops.registry import op

NAME = "compress_windows"
NUMBERS, WARPS = 4096, 4
"""Elements per program and iteration, and warps per program."""


@op
def compress_windows(
    inputs: Tensor,
    page_table: Tensor,
    row: Tensor,
    slot: Tensor,
    bias: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One entry for each window of m tokens (0 .. m - 1, m .. 2 m - 1, ...) whose last token is in
    the step: the mean of the tokens' values, weighted per channel by the softmax of their logits +
    bias, then normed, with its last dimensions rotated by cos_sin. Computed in float32, rounded
    once.

    The inputs of a token are w values, then w logits. With w = d the mean is over the m tokens of
    the window. With w = 2 d it is over 2 m items: the first d values of each token of the previous
    window, and the last d values of each token of this window; the first window has only the
    latter.

    Args:
        inputs: [pages, S, 2 w] float32, pages of any stride.
        page_table: [rows, max_pages] int32.
        row: [T] int64, of the page table.
        slot: [T] int64; -1: padding. A token is the last of a window if slot + 1 is a multiple of
            m.
        bias: [m, w] float32, by position in the window.
        norm: [d] float32, bfloat16 or float16.
        eps: added to the mean square.
        cos_sin: [T, n] float32, angles of the first token of the window that ends with the token.
        dtype: dtype of the result; None: float32.
    Returns:
        [T, d]; 0 for tokens that are not the last of a window.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) a row or slot beyond the page
            table.
    """
    size, (rate, wide), dim = inputs.shape[1], bias.shape, norm.shape[0]
    out = torch.zeros((len(slot), dim), dtype=dtype or torch.float32, device=slot.device)
    closing = ((slot >= 0) & ((slot + 1) % rate == 0)).nonzero()[:, 0]
    back = torch.arange(wide // dim * rate - 1, -1, -1, device=slot.device)
    block = paging.tokens_per_block(16 * len(back) * wide, len(closing))
    for first in range(0, len(closing), block):
        token = closing[first : first + block]
        # Items of an entry: the tokens of its window and, with overlap, those of the previous
        # window.
        item = slot[token].unsqueeze(1) - back
        absent = (item < 0).unsqueeze(-1)
        item = item.clamp(min=0)
        page = page_table[row[token].unsqueeze(1), item // size].long()
        taken = inputs[page, item % size]
        values, logits = taken.split(wide, dim=-1)
        logits = logits + bias.repeat(wide // dim, 1)
        if wide > dim:
            values, logits = (_parts(x, rate, dim) for x in (values, logits))
        logits = logits.masked_fill(absent, -torch.inf)
        values = values.masked_fill(absent, 0)
        entry = _weighed(values, logits).unsqueeze(1)
        entry = norm_rope_tail.reference(entry, cos_sin[token], norm, eps)
        out[token] = entry.squeeze(1).to(out.dtype)
    return out


def _parts(x: Tensor, rate: int, dim: int) -> Tensor:
    """[n, 2 m, d] of [n, 2 m, 2 d]: the first half of the previous window's values, the last half
    of its own window's."""
    return torch.cat((x[:, :rate, :dim], x[:, rate:, dim:]), dim=1)


def _weighed(values: Tensor, logits: Tensor) -> Tensor:
    """Sums over items of values [n, items, d], weighted by the softmax of their logits: [n, d].

    Summed item by item, so that the order does not depend on what else is in the step.
    """
    weights = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    total, entry = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for i in range(values.shape[1]):
        total += weights[:, i]
        entry += weights[:, i] * values[:, i]
    return entry / total


@compress_windows.fake
def _(call: Call) -> Tensor:
    shape = len(call.slot), call.norm.shape[0]
    return torch.empty(shape, dtype=call.dtype or torch.float32, device=call.slot.device)


@compress_windows.check
def _(call: Call) -> None:
    expect(NAME, "inputs", call.inputs, 3, FLOAT32, None, 1)
    _, size, both = call.inputs.shape
    expect(NAME, "bias", call.bias, 2, FLOAT32, call.inputs)
    rate, wide = call.bias.shape
    if not size or not rate or both != 2 * wide:
        refuse(NAME, "inputs", f"has shape {list(call.inputs.shape)}, not [pages, S, {2 * wide}]")
    expect(NAME, "norm", call.norm, 1, FLOATS, call.inputs)
    dim = call.norm.shape[0]
    if not dim or wide not in (dim, 2 * dim):
        refuse(NAME, "bias", f"has {wide} columns, which are not the {dim} of the norm, nor twice")
    tokens = len(call.slot)
    expect(NAME, "slot", call.slot, (tokens,), INT64, call.inputs)
    check_rows(NAME, tokens, call.row, call.page_table, call.inputs)
    expect(NAME, "cos_sin", call.cos_sin, (tokens, None), FLOAT32, call.inputs)
    if call.cos_sin.shape[1] % 2 or call.cos_sin.shape[1] > dim:
        refuse(NAME, "cos_sin", f"has {call.cos_sin.shape[1]} columns, not an even number to {dim}")
    check_dtype(NAME, call.dtype)
    expect_within(NAME, "row", call.row, len(call.page_table))
    expect_within(NAME, "slot", call.slot, call.page_table.shape[1] * size, begin=None)


@compress_windows.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.norm.shape[0] % 2 == 0
        and call.page_table.stride(1) == 1
        and call.cos_sin.stride(1) == 1
        and all(x.is_contiguous() for x in (call.row, call.slot, call.bias, call.norm))
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    (rate, wide), dim, device = call.bias.shape, call.norm.shape[0], call.slot.device
    tokens, padded = len(call.slot), gpu.next_power_of_2(dim)
    out = gpu.empty((tokens, dim), call.dtype or torch.float32, device)
    if not tokens:
        return out
    items = wide // dim * rate
    compress_kernel[(tokens,)](
        inputs=call.inputs,
        table=call.page_table,
        rows=call.row,
        slots=call.slot,
        bias=call.bias,
        norm=call.norm,
        cos_sin=call.cos_sin,
        out=out,
        eps=call.eps,
        page_stride=call.inputs.stride(0),
        slot_stride=call.inputs.stride(1),
        table_stride=call.page_table.stride(0),
        angle_stride=call.cos_sin.stride(0),
        DIM=dim,
        DP=padded,
        WIDE=wide,
        RATE=rate,
        ITEMS=items,
        SIZE=call.inputs.shape[1],
        ROTATED=call.cos_sin.shape[1],
        AT_ONCE=max(1, min(gpu.next_power_of_2(items), NUMBERS // padded)),
        num_warps=WARPS,
    )
    return out
