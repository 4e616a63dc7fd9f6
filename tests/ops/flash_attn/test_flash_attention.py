"""The flash attention kernel under the interpreter: all masks, layouts and options of the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.flash_attn.append_kv import append_kv
from cairn.ops.flash_attn.flash_attention import drawn, flash_attention
from cairn.ops.flash_attn.launch import Task, attend
from cairn.ops.testing import Make, cases_of, check

FEW = {"queries": (1, 1), "keys": (37, 1), "heads": (4, 2), "widths": (16, 16)}
SOME = {"queries": (5, 0, 21), "keys": (5, 9, 13), "heads": (3, 1), "widths": (7, 20)}
LONG = {"queries": (1, 2), "keys": (300, 3), "heads": (4, 2), "widths": (16, 20)}
"""Long enough for split keys."""
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
@pytest.mark.parametrize("spoilt", [0, 1])
def test_heads_that_are_read_together_do_not_see_each_other(spoilt: int) -> None:
    given = list(drawn(Make(), torch.float32, **LONG, page=16, right=0).args)
    expected, lse = (x.clone() for x in given[3:5])
    attend(Task(*given[:3], expected, lse, *given[5:]))
    for cache in given[1:3]:
        cache[:, :, spoilt] = torch.nan
    attend(Task(*given))
    others = slice(2, 4) if spoilt == 0 else slice(0, 2)
    assert torch.equal(given[3][:, others], expected[:, others])
    assert torch.equal(given[4][others], lse[others])
    assert given[3][:, [h for h in range(4) if h not in range(4)[others]]].isnan().all()


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_append_agrees_with_definition() -> None:
    for arguments in cases_of(append_kv):
        if arguments.args[0].dtype == torch.float32:
            check(append_kv, "triton", arguments)
