"""Guesses of a row's next tokens, which the next step runs beside its last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cairn.engine.request import Request


class Drafter(Protocol):
    """Guesses what comes next. A wrong guess costs time, never a token."""

    def guess(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow these (prompt and output so far)."""


def guesses_of(
    drafter: Drafter, requests: Sequence[Request], budget: int
) -> dict[Request, list[int]]:
    """Guesses for rows that decode, where the drafter has any.

    Args:
        drafter: guesses.
        requests: of the rows.
        budget: tokens that the step may run.
    """
    room = (budget - len(requests)) // max(1, len(requests))
    found = ((request, _guesses(drafter, request, room)) for request in requests)
    return {request: guesses for request, guesses in found if guesses}


def _guesses(drafter: Drafter, request: Request, room: int) -> list[int]:
    """Nothing where each token depends on more than the tokens before it, or where a step in flight
    has yet to choose the last one."""
    params = request.params
    plain = not (params.penalized or params.logit_bias or params.selection)
    plain = plain and request.grammar is None and params.logprobs is None
    if not plain or request.choosing or params.min_tokens > request.num_output:
        return []
    # The last token that it may have follows the last one that runs.
    left = request.num_prompt + request.max_output - request.planned - 2
    most = min(room, left)
    return list(drafter.guess(request.tokens, most))[:most] if most > 0 else []
