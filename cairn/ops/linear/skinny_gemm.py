"""Launches of products of at most 16 tokens with a weight on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.linear.kernels import rows_kernel, tile_kernel
from cairn.ops.linear.tuning import TUNING
from cairn.ops.norm.launch import LONGEST

TILE_TOKENS = 16
"""Most tokens of these kernels; the library handles more."""


class Around(NamedTuple):
    """Operations fused with a product.

    Attributes:
        bias: [N], added.
        norm, eps: weight [K] of the rmsnorm that the input goes through first, and its eps.
        gated: the result is silu of the first half of the outputs, times the second half.
        add: the result is added to the output.
    """

    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    add: bool = False


def accepts(input: Tensor, weight: Tensor, gated: bool = False, add: bool = False) -> bool:
    """Whether these kernels support tokens [T, K] and a weight [N, K], and are faster than the
    library, whose product can also accumulate (`add`).

    A tile of several tokens must fit into shared memory together with rows of the weight (of both
    halves if `gated`).
    """
    if not _takes(input, weight) or not 16 <= weight.shape[1] <= TUNING.skinny_max_width:
        return False
    tokens, (outputs, width) = input.shape[0], weight.shape
    held = outputs * gpu.next_power_of_2(width) * weight.element_size()
    if tokens <= TUNING.skinny_rows_tokens:
        return tokens == 1 or not add or held <= TUNING.skinny_tile_bytes
    most = (
        TUNING.skinny_wide_tile_bytes
        if width > TUNING.skinny_span and tokens > 8
        else TUNING.skinny_tile_bytes
    )
    return held <= most and _fits(input, weight, gated)


def accepts_split(input: Tensor, weight: Tensor) -> bool:
    """`accepts` for several tokens with split-K, which launches one more kernel: it only pays where
    that starts early (PDL)."""
    outputs, width = weight.shape
    return (
        _takes(input, weight)
        and input.shape[0] > TUNING.skinny_rows_tokens
        and (input.device.type != "cuda" or gpu.supports_pdl(input.device))
        and width % TUNING.skinny_span == 0
        and 2 * TUNING.skinny_span <= width <= TUNING.skinny_max_width
        and -(-outputs // TUNING.skinny_split_rows) * (width // TUNING.skinny_span)
        <= TUNING.skinny_split_programs
        and outputs <= LONGEST
    )


def _takes(input: Tensor, weight: Tensor) -> bool:
    whole = input.dtype == torch.float32 and input.device.type == "cuda"
    return (
        input.dim() == 2
        and 0 < input.shape[0] <= (TUNING.skinny_rows_tokens if whole else TILE_TOKENS)
        and input.dtype == weight.dtype
        and input.stride(1) == 1
        and weight.is_contiguous()
    )


def _fits(input: Tensor, weight: Tensor, gated: bool) -> bool:
    tokens = _tile_tokens(input.shape[0])
    outputs, width = weight.shape
    rows = _tile_rows(outputs // (1 + gated), width, tokens, gated) * (1 + gated)
    line = gpu.next_power_of_2(width) * weight.element_size()
    return (rows + tokens) * line + TUNING.skinny_scratch_bytes <= gpu.max_shared_memory(
        input.device
    )


def _tile_rows(outputs: int, width: int, tokens: int, gated: bool) -> int:
    """Rows per program; fewer if rows are long, or if there are few rows and many tokens."""
    if outputs >= TUNING.skinny_many_rows:
        return 32
    if gated or (width <= TUNING.skinny_span and (tokens <= 8 or outputs > 1024)):
        return TUNING.skinny_transposed_rows
    return 8


def _tile_tokens(tokens: int) -> int:
    return 8 if tokens <= 8 else 16


def multiply(input: Tensor, weight: Tensor, out: Tensor, around: Around) -> Tensor:
    """Compute out [T, N], see `rows_kernel`; requires `accepts`."""
    tokens, width = input.shape
    outputs = out.shape[1]
    if tokens > TUNING.skinny_rows_tokens:
        rows = _tile_rows(outputs, width, _tile_tokens(tokens), around.gated)
        _tile(input, weight, out, around, rows, width)
        return out
    padded = gpu.next_power_of_2(width)
    row_bytes = padded * weight.element_size() * (1 + around.gated)
    rows = 8 if outputs >= TUNING.skinny_many_rows else 2
    warps = rows * row_bytes // (32 * TUNING.skinny_thread_bytes)
    rows_kernel[(-(-outputs // rows),)](
        **_operands(input, weight, out, around),
        WP=padded,
        ROWS=rows,
        TOKENS=gpu.next_power_of_2(tokens),
        num_warps=max(1, min(16, warps)),
    )
    return out


def multiply_parts(input: Tensor, weight: Tensor) -> Tensor:
    """Parts [splits, T, N] float32 whose sum is the product; requires `accepts_split`."""
    shape = (weight.shape[1] // TUNING.skinny_span, input.shape[0], weight.shape[0])
    parts = gpu.empty(shape, torch.float32, input.device)
    _tile(input, weight, parts, Around(), TUNING.skinny_split_rows, TUNING.skinny_span)
    return parts


def _tile(input: Tensor, weight: Tensor, out: Tensor, around: Around, rows: int, span: int) -> None:
    """Launch `tile_kernel` with `rows` rows of the weight and `span` columns per program."""
    padded = gpu.next_power_of_2(span)
    warps = min(16, max(4, padded // 256))
    tile_kernel[(-(-out.shape[-1] // rows), weight.shape[1] // span)](
        **_operands(input, weight, out, around),
        SPAN=span,
        WP=padded,
        PARTS=min(warps, padded // 16),
        ROWS=rows,
        TOKENS=_tile_tokens(input.shape[0]),
        TALL=rows == TUNING.skinny_transposed_rows,
        num_warps=warps,
    )


def _operands(input: Tensor, weight: Tensor, out: Tensor, around: Around) -> dict[str, Any]:
    """Arguments of both kernels."""
    return {
        "x": input,
        "norm": around.norm,
        "weight": weight,
        "bias": around.bias,
        "out": out,
        "tokens": input.shape[0],
        "outputs": out.shape[-1],
        "x_stride": input.stride(0),
        "out_stride": out.stride(-2),
        "eps": around.eps,
        "WIDTH": weight.shape[1],
        "GATED": around.gated,
        "ADD": around.add,
        "PDL": gpu.supports_pdl(input.device),
    }
