"""Steps that are planned before the guesses of the previous step are verified.

While a step verifies a row's guesses, the next step is planned as if all of them were right: it
runs the token that should follow them, and the guesses behind it. So a GPU does not wait for the
host while a row copies text. Once the first step's tokens are known, it is clear whether the second
one began with the right token. If not, the tokens that it chose are dropped, and the row continues
from its true tokens. The slots that the step wrote come after these: they are overwritten before
anything reads them, like wrong guesses of a single step.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.engine.drafts import Drafter
from cairn.engine.pace import Pace, all_right
from cairn.engine.request import Request, RowCounts
from cairn.runner.step import RowWork

LIKELY = 0.7
"""Least estimated probability that all guesses of a row's step are right. Running ahead of right
guesses saves the host's time between two steps (0.7 ms for a small model on an H200); running ahead
of wrong ones costs a step (0.7 ms there) minus that time."""


def began_right(request: Request, work: RowWork | None = None) -> bool:
    """Whether a request's work (by default its latest in flight) began with the token that the
    request really has at that position."""
    tokens, work = request.tokens, work or request.verifying
    if work is None or work.tokens is None:
        return True
    return len(tokens) > work.first and tokens[work.first] == work.tokens[0]


def go_back(request: Request, counts: RowCounts) -> None:
    """Reset a request whose latest work began after wrong guesses to the tokens that it has."""
    counts.planned[request.row] = len(request.tokens) - 1
    request.verifying, request.stale = None, True


def tokens_ahead(
    drafter: Drafter, verifying: Sequence[Request], budget: int, pace: Pace | None
) -> dict[Request, list[int]]:
    """The tokens that rows run next if their guesses in flight are all right: one token, then
    guesses.

    Args:
        drafter: gives guesses that do not depend on how many are asked for.
        verifying: requests whose guesses are in flight.
        budget: tokens that the step may run.
        pace: decides whether the guesses in flight are likely enough; None: any are.
    Returns:
        Tokens by request. Empty unless every request has some: the others would need a step of
        their own, between two of these.
    """
    found = {}
    for request in verifying:
        work = request.verifying
        assert work is not None
        left = request.num_prompt + request.max_output - request.planned - 2
        most = min(budget // len(verifying) - 1, left, drafter.drafts)
        likely = pace is None or all_right(request, drafter.drafts) >= LIKELY
        if most < 1 or not likely or request.asks_more:
            return {}
        in_flight = list(work.guesses)
        guesses = list(drafter.guess(request, len(in_flight) + 1 + most))
        following = guesses[len(in_flight) :]
        if guesses[: len(in_flight)] != in_flight or len(following) < 2:
            return {}
        found[request] = following
    return found
