"""Texts of which rounding alone chooses the pages."""

from __future__ import annotations

from hypothesis import assume

from cairn.engine.build import Built
from tests.engine.harness import ROUNDING, Trace, difference
from tests.failures.oracle import oracle

CLOSE = 5e-6
"""Part of their query's largest score by which two pages lie apart, below which either may be
taken. Hidden states of two schedules differ in the last bits: scores of up to 20 were seen to
differ by 4.2e-5, 2.1e-6 of the largest; a gap between two of them by twice as much."""


def leave_out_ties(a: Trace, b: Trace, prompt: list[int], built: Built) -> None:
    """End an example of hypothesis whose answers differ by more than rounding, if a query's last
    page taken and first one left score alike. NaN, or fewer tokens, is no such difference."""
    if ROUNDING <= difference(a.logprobs, b.logprobs) < float("inf"):
        _, batch = oracle(built, prompt + a.tokens)
        assume(batch.margin >= CLOSE)
