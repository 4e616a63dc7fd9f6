"""Differences that rounding explains are ignored, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine import ties
from tests.engine.harness import Trace


def answer(tokens: list[int], rows: list[list[float]]) -> Trace:
    return Trace(tokens=tokens, logprobs=np.array(rows), prompt_logprobs=np.empty(0), cached=0)


@pytest.mark.parametrize(
    ("margin", "gap", "before", "left_out"),
    [
        (1.0, 1e-6, 0.0, True),
        (1.0, 1e-3, 0.0, False),
        (1.0, 1e-6, 1e-2, False),  # they differ already where the tokens are the same
        (0.0, 1e-3, 0.0, True),
    ],
)
def test_ties_of_pages_and_of_tokens(margin, gap, before, left_out, monkeypatch):
    monkeypatch.setattr(ties, "oracle", lambda *_: (None, SimpleNamespace(margin=margin)))
    one = answer([1, 1, 0], [[-9.0, -1.0], [-1.0 - gap, -1.0], [-0.5, -3.0]])
    other = answer([1, 0, 1], [[-9.0, -1.0 + before], [-1.0, -1.0], [-7.0, -0.1]])
    asked: list[bool] = []
    monkeypatch.setattr(ties, "assume", asked.append)
    ties.leave_out_ties(one, other, [5], None)
    assert all(asked) != left_out
