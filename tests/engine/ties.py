"""Texts of which rounding alone chooses the pages."""

from __future__ import annotations

from hypothesis import assume

from cairn.engine.build import Built
from tests.engine.harness import Trace, difference
from tests.failures.oracle import oracle

CLOSE = 4e-6
"""Four steps of float32 between 8 and 16, where scores lie: any rounding may take either page."""


def leave_out_ties(a: Trace, b: Trace, prompt: list[int], built: Built, rounding: float) -> None:
    """End an example of hypothesis whose answers differ by more than rounding, if a query's last
    page taken and first one left score alike. NaN, or fewer tokens, is no such difference."""
    if rounding <= difference(a.logprobs, b.logprobs) < float("inf"):
        _, batch = oracle(built, prompt + a.tokens)
        assume(batch.margin >= CLOSE)
