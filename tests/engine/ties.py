"""Texts of which rounding alone chooses the pages."""

from __future__ import annotations

from hypothesis import assume

from cairn.engine.build import Built
from tests.engine.harness import ROUNDING, Trace, difference
from tests.failures.oracle import oracle

CLOSE = 1e-4
"""Two pages whose scores lie closer may be taken either way: hidden states of two schedules differ
in the last bits, and scores of 20 were seen to differ by 4.2e-5, so their gaps by twice that. The
widest gap that two schedules ordered differently was 1.2e-5."""


def leave_out_ties(a: Trace, b: Trace, prompt: list[int], built: Built) -> None:
    """End an example of hypothesis whose answers differ by more than rounding, if a query's last
    page taken and first one left score alike. NaN, or fewer tokens, is no such difference."""
    if ROUNDING <= difference(a.logprobs, b.logprobs) < float("inf"):
        _, batch = oracle(built, prompt + a.tokens)
        assume(batch.margin >= CLOSE)
