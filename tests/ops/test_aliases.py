"""Keyword aliases of an op's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.registry import op


def scaled(input: Tensor, factor: float = 2.0, out: Tensor | None = None) -> Tensor:
    """input * factor."""
    return input * factor


def test_a_keyword_and_its_alias_are_the_same_parameter() -> None:
    made = op(aliases={"by": "factor"})(scaled)
    try:

        @made.implementation("twice", when=lambda call: call.factor == 5.0)
        def _(call: Call) -> Tensor:
            return call.input * (2 * call.factor)

        assert made(torch.ones(2), by=3.0).tolist() == [3.0, 3.0]
        assert made(torch.ones(2), by=5.0).tolist() == [10.0, 10.0]
        assert made.choice(torch.ones(2), by=5.0) == "twice"
        compiled = torch.compile(
            lambda x: made(x, by=3.0), fullgraph=True, backend="aot_eager", dynamic=False
        )
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
        with pytest.raises(TypeError, match="both 'factor' and 'by'"):
            made(torch.ones(2), by=3.0, factor=3.0)
        with pytest.raises(TypeError):
            made(torch.ones(2), 2.0, by=3.0)
    finally:
        made.unregister()
