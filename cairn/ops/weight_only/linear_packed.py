"""Linear layers with a 4-bit or 8-bit weight in the engine's layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, INT32, expect, refuse
from cairn.ops.linear.linear import linear
from cairn.ops.registry import op
from cairn.ops.weight_only import layout, packed_launch
from cairn.ops.weight_only.packed_launch import Packed

BITS = (4, 8)
ZEROS = (torch.int16,)


@op
def dequantize_packed(
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    e4m3: bool = False,
) -> Tensor:
    """(code - zero) * scale of each group of elements of a row, in float32, rounded once.

    Args:
        words: [.., W, N] int32 in the layout of `cairn.ops.weight_only.layout`.
        scale: [.., G, N] float32; K is a multiple of G.
        zero: [.., G, N] int16; None: 2^(bits - 1).
        bits: 4 or 8.
        width: K.
        dtype: dtype of the result: float32, bfloat16 or float16.
        e4m3: 8-bit codes are float8 e4m3 values, without zero points.
    Returns:
        [.., N, K].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return layout.dequantised(words, scale, zero, bits, width, e4m3).to(dtype)


@op
def linear_packed(
    input: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int
) -> Tensor:
    """input @ w.T in float32, rounded once, w = `dequantize_packed`(words, scale, zero, bits, K).

    Args:
        input: [T, K] float32, bfloat16 or float16.
        words: [W, N] int32.
        scale: [G, N] float32; K is a multiple of G.
        zero: [G, N] int16; None: 2^(bits - 1).
        bits: 4 or 8.
    Returns:
        [T, N] of input's dtype.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    weight = layout.dequantised(words, scale, zero, bits, input.shape[1])
    return torch.nn.functional.linear(input.float(), weight).to(input.dtype)


def check_packed(name: str, call: Call, width: int, like: Tensor) -> None:
    """Raise BadArgument unless words, scales and zero points of a call have the right shapes for
    rows of K elements."""
    if call.bits not in BITS:
        refuse(name, "bits", f"is {call.bits}, not 4 or 8")
    if width < 1:
        refuse(name, "width", f"is {width}, not 1 or more")
    expect(name, "words", call.words, dtypes=INT32, like=like)
    rows = layout.words_of(width, call.bits)
    if call.words.dim() < 2 or call.words.shape[-2] != rows:
        refuse(name, "words", f"has shape {list(call.words.shape)}, not [.., {rows}, any]")
    *lead, _, outputs = call.words.shape
    expect(name, "scale", call.scale, (*lead, None, outputs), FLOAT32, like, 1)
    groups = call.scale.shape[-2]
    if not groups or width % groups:
        refuse(name, "scale", f"has {groups} groups, which {width} is no multiple of")
    if call.zero is not None:
        expect(name, "zero", call.zero, call.scale.shape, ZEROS, like, 1)


@dequantize_packed.check
def _(call: Call) -> None:
    name = "dequantize_packed"
    expect(name, "words", call.words)
    check_packed(name, call, call.width, call.words)
    if call.e4m3 and (call.bits != 8 or call.zero is not None):
        refuse(name, "e4m3", f"is true for {call.bits} bits, or with zero points")
    if call.dtype not in FLOATS:
        refuse(name, "dtype", f"is {call.dtype}, not float32, bfloat16 or float16")


@linear_packed.check
def _(call: Call) -> None:
    name = "linear_packed"
    expect(name, "input", call.input, 2, FLOATS)
    expect(name, "words", call.words, 2)
    check_packed(name, call, call.input.shape[1], call.input)


def _packed(call: Call, width: int) -> Packed:
    return Packed(call.words, call.scale, call.zero, call.bits, width)


@dequantize_packed.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: packed_launch.accepts(_packed(call, call.width)),
    replayed=True,
)
def _(call: Call) -> Tensor:
    *lead, _, outputs = call.words.shape
    out = gpu.empty((*lead, outputs, call.width), call.dtype, call.words.device)
    weight = replace(_packed(call, call.width), e4m3=call.e4m3)
    return packed_launch.dequantize(weight, out)


@linear_packed.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: packed_launch.multiplies(call.input, _packed(call, call.input.shape[1])),
    replayed=True,
)
def _(call: Call) -> Tensor:
    out = gpu.empty((call.input.shape[0], call.words.shape[1]), call.input.dtype, call.input.device)
    return packed_launch.multiply(call.input, _packed(call, call.input.shape[1]), out)


@linear_packed.implementation("dequantized", devices=("cuda",) if gpu.AVAILABLE else ())
def _(call: Call) -> Tensor:
    """For many tokens: dequantise the weight to the tokens' dtype, then multiply."""
    width = call.input.shape[1]
    weight = dequantize_packed(
        call.words, call.scale, call.zero, call.bits, width, call.input.dtype
    )
    return linear(call.input, weight)


linear_packed.tolerance(
    {torch.bfloat16: (1.6e-2, 2e-2)}, "the weight is rounded before products of many tokens"
)
