"""E8M0 (OCP microscaling formats): a scale as one byte e, worth 2 ** (e - 127); 255 is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = 255
_INFINITY = 0x7F800000
"""Bits of the float32; those of NaN are more, those of negative numbers are negative."""


def encode(scale: Tensor) -> Tensor:
    """uint8 codes of scales (float32) rounded up to powers of two.

    0 becomes 2 ** -127, a subnormal number 2 ** -126. Values that are negative, not finite or above
    2 ** 127 become NaN. PyTorch's conversion to float8_e8m0fnu differs: it rounds to the nearest
    power and drops the sign.
    """
    bits = (scale + 0.0).contiguous().view(torch.int32)  # -0 is 0
    # NaN as infinity: the sum must not overflow.
    exponent = (bits.clamp(max=_INFINITY) + 0x7FFFFF) >> 23
    return exponent.masked_fill(bits < 0, NAN).to(torch.uint8)


def decode(code: Tensor) -> Tensor:
    """float32 of codes, uint8 or float8_e8m0fnu."""
    exponent = code.view(torch.uint8).int()
    # 2 ** -127 is subnormal: its only bit lies below those of the exponent.
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)
    return bits.view(torch.float32).masked_fill(exponent == NAN, torch.nan)


def power_of_two(scale: Tensor) -> Tensor:
    """Scales rounded up to powers of two, as float32: `encode`, then `decode`."""
    return decode(encode(scale))
