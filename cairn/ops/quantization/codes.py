"""8-bit codes and scales, as the reference implementations of this folder compute them."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
INT8_MAX = 127.0


def scale_for(amax: Tensor, largest: float) -> Tensor:
    """amax / largest, rounded once. Divided by a tensor: by a Python number, a GPU would multiply
    by the reciprocal."""
    return amax / torch.full_like(amax, largest)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, at most the largest float32; 0 for 0."""
    found = (1.0 / scale).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(scale == 0, 0.0, found)


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale; 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, x / scale)


def e4m3(x: Tensor) -> Tensor:
    """float32 as e4m3: clamped to +-448, to the nearest, ties to even. NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
