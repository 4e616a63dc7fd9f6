"""Texts of which rounding alone chooses the pages."""

from __future__ import annotations

from hypothesis import assume

from cairn.engine.build import Built
from tests.engine.harness import ROUNDING, Trace, difference
from tests.failures.oracle import oracle

CLOSE = 4e-6
"""Three times the widest gap that two schedules were seen to order differently: 1.3e-6, of scores
of 3. Their hidden states differ in the last bits."""


def leave_out_ties(a: Trace, b: Trace, prompt: list[int], built: Built) -> None:
    """End an example of hypothesis whose answers differ by more than rounding, if a query's last
    page taken and first one left score alike. NaN, or fewer tokens, is no such difference."""
    if ROUNDING <= difference(a.logprobs, b.logprobs) < float("inf"):
        _, batch = oracle(built, prompt + a.tokens)
        assume(batch.margin >= CLOSE)
