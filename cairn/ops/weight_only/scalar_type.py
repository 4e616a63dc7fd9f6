"""Weight types of Marlin's ops: integers with a bit field per property.

From the lowest bit: exponent 8, mantissa 8, signed 1, bias 32 (signed), finite only 1, kind of NaN
8. An integer type has exponent + mantissa + signed bits, and a code has the value code - bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops.checks import refuse
from cairn.ops.quantization.codes import E4M3
from cairn.ops.quantization.nvfp4 import values


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A weight type.

    Attributes:
        exponent, mantissa: bits.
        signed: whether there is a sign bit.
        bias: subtracted from codes of integer types.
        finite_only, nan: for floating-point types: whether there is no infinity, and the kind of
            NaN.
    """

    exponent: int
    mantissa: int
    signed: bool = False
    bias: int = 0
    finite_only: bool = False
    nan: int = 1

    @property
    def id(self) -> int:
        """The integer id of the type."""
        fields = (
            *((self.exponent, 8), (self.mantissa, 8), (self.signed, 1)),
            *((self.bias, 32), (self.finite_only, 1), (self.nan, 8)),
        )
        number, at = 0, 0
        for value, width in fields:
            number |= (int(value) & ((1 << width) - 1)) << at
            at += width
        return number

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.exponent + self.mantissa + self.signed


UINT4 = ScalarType(0, 4)
UINT8 = ScalarType(0, 8)
UINT4B8 = ScalarType(0, 4, bias=8)
UINT8B128 = ScalarType(0, 8, bias=128)
FLOAT4_E2M1 = ScalarType(2, 1, True, 0, True, 0)
FLOAT8_E4M3 = ScalarType(4, 3, True, 0, True, 2)
NAMED = {
    "uint4": UINT4,
    "uint8": UINT8,
    "uint4b8": UINT4B8,
    "uint8b128": UINT8B128,
    "float4_e2m1f": FLOAT4_E2M1,
    "float8_e4m3fn": FLOAT8_E4M3,
}
BY_ID = {kind.id: kind for kind in NAMED.values()}


def id_of(op: str, kind: Any) -> int:
    """The id of a type, given as an integer or as an object with an `id`. Raises BadArgument for an
    unknown one."""
    number = getattr(kind, "id", kind)
    if not isinstance(number, int) or number not in BY_ID:
        known = ", ".join(NAMED)
        refuse(op, "b_q_type", f"is {kind!r}, not the number of a known type: {known}")
    return number


def values_of(kind: ScalarType, codes: Tensor) -> Tensor:
    """Values of codes (int32), float32."""
    if kind == FLOAT4_E2M1:
        return values(codes)
    if kind == FLOAT8_E4M3:
        return codes.to(torch.uint8).view(E4M3).float()
    return (codes - kind.bias).float()
