"""Quantisation formats of checkpoints, as frozen dataclasses. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Layout = Literal["gptq", "awq", "packed", "int8", "fp8", "nvfp4", "modelopt_nvfp4", "mxfp4"]
"""Words of GPTQ, of AWQ or of compressed-tensors, codes of 8 bits, or pairs of e2m1 codes with
scales of 16 or 32 numbers."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How one matrix is stored.

    Attributes:
        layout: what its tensors are.
        bits: of a code of "gptq", "awq" and "packed".
        group: elements of a row that share a scale; None: the whole row, 0: the whole matrix.
        zeros: there are zero points beside the scales.
        ordered: a tensor names the group of each column (act order).
        less_one: the stored value is the zero point - 1, as GPTQ's first format does.
    """

    layout: Layout
    bits: int = 8
    group: int | None = None
    zeros: bool = False
    ordered: bool = False
    less_one: bool = True


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """How matrices of a checkpoint are quantised.

    Attributes:
        scheme: name of the Linear scheme. "on_load": the checkpoint is not, matrices are quantised
            to e4m3 with a scale for each row when they are read.
        block: (rows, columns) that share a scale; "fp8_block" only.
        plain: modules that are not quantised, by their names in the checkpoint.
        scale_name: of scales, behind the matrix's; "fp8_block" only.
        experts: how matrices of experts are stored: as others, or "fp4", e2m1 codes with an e8m0
            scale for every 32 columns; "fp8_block" only.
        packed: such experts stay so in memory and are dequantised when they run.
        stored: of "stored".
        patterns: regular expressions of further modules that are not quantised.
    """

    scheme: Literal["fp8_block", "stored", "on_load"]
    block: tuple[int, int] = (128, 128)
    plain: tuple[str, ...] = ()
    scale_name: str = "weight_scale_inv"
    experts: Literal["block", "fp4"] = "block"
    packed: bool = False
    stored: StoredFormat | None = None
    patterns: tuple[str, ...] = ()

    def is_plain(self, module: str) -> bool:
        """Whether a module, by its name in the checkpoint, is not quantised."""
        return any(module == one or module.startswith(f"{one}.") for one in self.plain) or any(
            re.search(pattern, module) for pattern in self.patterns
        )
