"""Rotary position embedding of a mixer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RotaryKind = Literal["standard", "in_range", "hope"]


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN's blend of interpolated and extrapolated frequencies (Peng et al. 2023, section 3.2).

    Attributes:
        factor: context extension.
        original: positions of the original context.
        beta_fast, beta_slow: rotations in the original context above which a frequency is kept and
            below which it is divided by `factor`.
        truncate: the bounds of the ramp are rounded to whole pairs.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's blend by wavelength.

    Attributes:
        factor: slow pairs are divided by it.
        original: positions of the original context.
        low, high: pairs that turn less than `low` times in the original context are divided, those
            that turn more than `high` times are kept, with a linear ramp in between.
    """

    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0


RotaryScaling = YarnSpec | LinearScaling | Llama3Scaling
"""How standard frequencies are changed so that they cover a longer context."""


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary frequencies of a layer.

    Attributes:
        kind: "standard": theta^(-2c/d) for every pair c. "in_range": standard, with pairs slower
            than 2 pi period_multiplier / context_length left unrotated. "hope": theta^(-c/pairs)
            for the first `pairs` pairs, the others unrotated.
        head_dim: d, the dimensions that rotate; there are d/2 pairs.
        theta: base of the frequencies.
        context_length: in slots; "in_range" only.
        period_multiplier: "in_range" only.
        pairs: rotated pairs; "hope" only.
        rounded: cos and sin are rounded to the model's dtype before use.
        scaling: of the frequencies; "standard" only.
        attention_factor: cos and sin are multiplied by it.
        interleaved: pairs are dimensions (2c, 2c + 1), not (c, c + d/2).
        sections: where tokens have positions on three axes, pairs of each; they alternate: pair i
            turns by axis i % 3 while that has pairs left, else by the first. None: by the first.
    """

    kind: RotaryKind
    head_dim: int
    theta: float
    context_length: int = 0
    period_multiplier: float = 1.0
    pairs: int = 0
    rounded: bool = False
    scaling: RotaryScaling | None = None
    attention_factor: float = 1.0
    interleaved: bool = False
    sections: tuple[int, ...] | None = None

    def axes(self) -> list[int]:
        """The axis by which each pair turns."""
        sections = self.sections or ()
        axes = ((i, i % 3) for i in range(self.head_dim // 2))
        return [a if a and sections and i < 3 * sections[a] else 0 for i, a in axes]


def yarn_magnitude(factor: float, scale: float) -> float:
    """YaRN's attention temperature: 0.1 scale ln(factor) + 1, or 1 without an extension."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
