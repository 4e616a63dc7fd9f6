"""Implementations propagate NaN and infinities in every argument as definitions do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import Arguments, cases_of, compare, run, tolerance_of
from tests.ops.arguments import tensors_of

FAMILIES = (
    *("activation", "cache", "elementwise", "grammar", "memory", "norm", "quantization"),
    "rotary",
)
"""Families of elementwise and row-wise ops. The definitions of others specify NaN and infinities,
and their cases contain them."""
OPS = [pytest.param(op, id=op.name) for op in all_ops() if op.family in FAMILIES]
SPECIAL = (math.nan, math.inf, -math.inf)


def spoilt(op: Op[..., Any], device: str) -> Iterator[tuple[str, Arguments]]:
    """The smallest case, with a NaN and two infinities in one of its float32 tensors."""

    def plain(case: Arguments) -> bool:
        known = (torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
        return all(x.numel() and (not x.is_floating_point() or x.dtype in known) for x in
                   tensors_of(case))  # fmt: skip

    cases = [case for case in cases_of(op, device) if plain(case)]
    case = min(cases, key=lambda one: sum(x.numel() for x in tensors_of(one)))
    named = case.named(list(op.__signature__.parameters))
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim():
            given = Arguments((), dict(named)).clone()
            for place, number in enumerate(SPECIAL):
                index = tuple((size // 2 + place) % size for size in value.shape)
                given.kwargs[name][index] = number
            yield name, given


def outcome(op: Op[..., Any], name: str, given: Arguments) -> dict[str, Tensor]:
    """Results and changed arguments, with float8 converted to float32 for comparison."""
    after, results = run(op, name, given)
    found = {f"result {place}": x for place, x in enumerate(results)}
    found |= {name: after.kwargs[name] for name in op.mutates if after.kwargs[name] is not None}
    return {what: x.float() if x.dtype.itemsize == 1 else x for what, x in found.items()}


@pytest.mark.parametrize("op", OPS)
def test_implementations_agree(op: Op[..., Any], device: str) -> None:
    for name, given in spoilt(op, device):
        expected = outcome(op, "reference", given)
        for implementation in op.implementations.values():
            runs = device in implementation.devices or (
                gpu.INTERPRETED and implementation.name == "triton"
            )
            if runs and op.accepts(implementation.name, **given.kwargs):
                got = outcome(op, implementation.name, given)
                for what, wanted in expected.items():
                    tolerance = tolerance_of(op, given, wanted.dtype)
                    where = f"{op.name}[{implementation.name}] of a spoilt {name}: {what}"
                    compare(got[what], wanted, tolerance, where)
