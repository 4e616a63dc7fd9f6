"""Decides where guesses pay: weighs the tokens that they are expected to add against the longer
step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cairn.engine.budget import Load, StepTimes
from cairn.engine.request import Request

FORGET = 0.9
"""Decay of a row's counts of right and tried guesses each time that it runs guesses."""
DRIFT = 0.98
"""Decay in each step in which its guesses would not pay, so that it tries again later."""
RETRY = 256
"""After so many steps in which no row's guesses would pay, some run to measure their cost again."""
LEARNED = 8
"""The first steps with guesses run whatever they seem to cost, since they capture graphs."""


@dataclass(slots=True)
class Pace:
    """Chooses the rows that run guesses. With R rows and a step of T seconds, guesses that bring E
    tokens more and make the step D seconds longer pay if (R + E) / (T + D) > R / T.

    Attributes:
        times: how long steps take.
        drafts: guesses of a row at a time.
        refused: steps since one with guesses was allowed.
    """

    times: StepTimes
    drafts: int
    refused: int = 0

    def candidates(self, requests: Sequence[Request], load: Load) -> list[Request]:
        """The requests whose guesses would pay by themselves in a step of this load; none until the
        time of a step without guesses is known."""
        step = self.times.decode_seconds(load)
        if step <= 0.0:
            return []
        found, tries = [], self._tries
        for request in requests:
            own = Load(drafts=self.drafts, drafts_context=self.drafts * request.planned)
            longer = self.times.draft_seconds(own, begin=False)
            if tries or expected(request, self.drafts) * step >= load.rows * longer:
                found.append(request)
            else:
                request.right *= DRIFT
                request.tried *= DRIFT
        self.refused += bool(requests) and not found
        return found

    @property
    def _tries(self) -> bool:
        """Whether a step with guesses should run to measure what it costs."""
        return self.times.guessing < LEARNED or self.refused > RETRY

    def pays(self, found: Mapping[Request, Sequence[int]], load: Load) -> bool:
        """Whether these guesses pay together; if not, none of them should run."""
        count = sum(map(len, found.values()))
        context = sum(len(guesses) * request.planned for request, guesses in found.items())
        longer = self.times.draft_seconds(Load(drafts=count, drafts_context=context))
        gain = sum(expected(request, len(guesses)) for request, guesses in found.items())
        if self._tries or gain * self.times.decode_seconds(load) >= load.rows * longer:
            # After a step that only makes guesses comes the step that verifies them.
            self.refused = 0 if count else self.refused
            return True
        self.refused += 1
        for request in found:
            request.right *= DRIFT
            request.tried *= DRIFT
        return False


def expected(request: Request, count: int) -> float:
    """Expected number of right guesses out of `count`, from the row's recent ones."""
    right = (request.right + 1.0) / (request.tried + 2.0)
    return right * (1.0 - right**count) / (1.0 - right)


def all_right(request: Request, count: int) -> float:
    """Estimated probability that `count` guesses of a row, and the one after them, are all
    right."""
    return float(((request.right + 1.0) / (request.tried + 2.0)) ** (count + 1))


def learn(request: Request, drafted: int, accepted: int) -> None:
    """Record how many of a row's drafts were accepted; after the first wrong one none count."""
    request.right = FORGET * request.right + accepted
    request.tried = FORGET * request.tried + min(drafted, accepted + 1)
