"""Texts for which rounding alone decides the selected pages or the tokens."""

from __future__ import annotations

from hypothesis import assume

from cairn.engine.build import Built
from tests.engine.harness import ROUNDING, Trace, difference
from tests.failures.oracle import oracle

CLOSE = 5e-6
"""Part of their query's largest score by which two pages lie apart, below which either may be
taken. Hidden states of two schedules differ in the last bits: scores of up to 20 were seen to
differ by 4.2e-5, 2.1e-6 of the largest; a gap between two of them by twice as much."""


CLOSE_TOKENS = 1.1e-4
"""Difference of the log-probabilities of two tokens below which rounding may swap them. Between two
schedules they differed by up to 5.3e-5; a gap between two of them by twice as much."""


def leave_out_ties(a: Trace, b: Trace, prompt: list[int], built: Built) -> None:
    """End an example of hypothesis whose answers differ by more than rounding, if a query's last
    page taken and first one left score alike, or the first tokens that differ do, after which all
    is of different texts. NaN, or fewer tokens, is no such difference."""
    if ROUNDING <= difference(a.logprobs, b.logprobs) < float("inf"):
        _, batch = oracle(built, prompt + a.tokens)
        assume(batch.margin >= CLOSE)
        pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
        at = next((at for at, (one, other) in pairs if one != other), None)
        if at is not None and difference(a.logprobs[: at + 1], b.logprobs[: at + 1]) < ROUNDING:
            row = a.logprobs[at]
            assume(row[a.tokens[at]] - row[b.tokens[at]] >= CLOSE_TOKENS)
