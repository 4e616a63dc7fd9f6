"""The kernel of flash attention under the interpreter: every mask, layout and extra of the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.flash.append_kv import append_kv
from cairn.ops.flash.flash_attention import drawn, flash_attention
from cairn.ops.testing import Make, cases_of, check

FEW = {"queries": (1, 1), "keys": (37, 1), "heads": (4, 2), "widths": (16, 16)}
SOME = {"queries": (5, 0, 21), "keys": (5, 9, 13), "heads": (3, 1), "widths": (7, 20)}
LONG = {"queries": (1, 2), "keys": (300, 3), "heads": (4, 2), "widths": (16, 20)}
"""So long that the keys are split."""
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"right": 0},
    "causal window": {"left": 4, "right": 0},
    "window": {"left": 3, "right": 2},
    "right": {"right": 3},
    "chunk": {"chunk": 4},
    "causal chunk": {"right": 0, "chunk": 8},
    "softcap": {"softcap": 1.5, "scale": 1.0, "right": 0},
    "sinks": {"sinks": True, "right": 0},
    "qv": {"qv": True},
    "descale": {"descale": True, "sinks": True},
}


CASES = [
    *((SOME, kind, {"page": -1}) for kind in KINDS),
    *((SOME, kind, {"page": 3, "pad": 1}) for kind in KINDS),
    *((FEW, kind, {"even": True, "pad": 1}) for kind in KINDS),
    *((LONG, kind, {"page": 16}) for kind in ("causal", "sinks", "window")),
    (LONG, "descale", {"even": True}),
    (SOME, "causal", {"page": 64}),
    (FEW, "causal window", {"page": 64, "even": True}),
]


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("base, kind, layout", CASES)
def test_kernel_agrees_with_definition(base: Any, kind: str, layout: Any) -> None:
    check(
        flash_attention,
        "triton",
        drawn(Make(), torch.float32, **base, **layout, **KINDS[kind]),
    )


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_append_agrees_with_definition() -> None:
    for arguments in cases_of(append_kv):
        if arguments.args[0].dtype == torch.float32:
            check(append_kv, "triton", arguments)
