"""How long a step takes, learned from the steps that ran, and how much prefill fits into one.

A step's seconds are a sum of costs, none of them negative:

    decode     a base, the rows that decode, the tokens that these look back at
    prefill    the rows that prefill, their tokens, the tokens that these look back at
    drafts     once if there are any, the guessed tokens, the tokens that these look back at

The first three are learned from steps that only decode, the others from what a step with prefill or
guesses takes beyond them: that difference is also how long rows that decode wait for prefill. An
observation counts by its relative error, so that a faster machine needs no other constants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cairn.runner.step import RowWork

FORGET = 0.95
"""Decay of older observations with each new one: about 20 steps count."""
DAMPING = 1e-3
"""Weight of the current estimate of a cost against one new observation."""
OUTLIER = 2.0
"""A step that takes more than this many times what was expected counts for less."""
UNLEARNED = 16
"""Most decode-only steps whose times are queued before they are learned. They are learned when an
estimate is needed, which must not take long; older ones were much the same and are dropped."""
SHORTEST = 1e-9
"""Lower bound of measured step times, in seconds."""
GROWTH = 2
"""A step prefills at most this many times the tokens that some step has prefilled before."""


@dataclass(slots=True)
class Load:
    """What a step runs, in user tokens.

    Attributes:
        rows: rows that decode one token each, and guesses behind it.
        rows_context: sum of the context lengths of those rows.
        chunks: rows that prefill.
        tokens: tokens that those rows prefill.
        context: sum of the context lengths of each of these tokens.
        drafts: guessed tokens.
        drafts_context: sum of the context lengths of each of these tokens.
    """

    rows: int = 0
    rows_context: int = 0
    chunks: int = 0
    tokens: int = 0
    context: int = 0
    drafts: int = 0
    drafts_context: int = 0

    def add(self, work: RowWork) -> None:
        """Count one more row's work."""
        if work.decodes:
            self.rows += 1
            self.rows_context += work.first
            drafts = work.drafted + len(work.branches)
            self.drafts += drafts
            self.drafts_context += drafts * work.first
        else:
            count = work.num_tokens
            self.chunks += 1
            self.tokens += count
            self.context += count * work.first + count * (count - 1) // 2


class StepTimes:
    """Predicts how long a step takes; learns from every step that ran.

    A step that takes far longer than expected moves the costs by a bounded amount; steps that are
    slow again and again become what is expected.

    Attributes:
        guessing: steps with guesses, and without prefill, that were observed.
    """

    def __init__(self) -> None:
        self.guessing = 0
        self._decode = _Costs(3)
        self._prefill = _Costs(3)
        self._drafts = _Costs(3)
        self._longest = 0
        self._unlearned: deque[tuple[Load, float]] = deque(maxlen=UNLEARNED)

    def observe(self, load: Load, seconds: float) -> None:
        """Learn that a step of this load took `seconds`."""
        if load.chunks:
            self._longest = max(self._longest, load.tokens)
            self._learn(load, seconds)
        elif load.drafts:
            self.guessing += 1
            self._learn(load, seconds)
        else:
            # Learned lazily: most steps only decode, and then no estimate is needed.
            self._unlearned.append((load, seconds))

    def _learn(self, load: Load, seconds: float) -> None:
        if seconds < SHORTEST:
            return
        decode = self.decode_seconds(load)
        prefill, drafts = self.prefill_seconds(load), self.draft_seconds(load)
        unit, beyond = max(decode + prefill + drafts, seconds / OUTLIER), max(0.0, seconds - decode)
        if load.chunks:
            self._prefill.learn(_prefill(load), max(0.0, beyond - drafts) - prefill, unit)
        elif load.drafts:
            # No prefill runs in such a step. The first one captures a graph; it must not make the
            # next ones, which are far shorter, count as outliers.
            self._drafts.learn(_drafts(load), beyond - drafts, min(unit, OUTLIER * seconds))
        if not (load.chunks or load.drafts) or seconds < decode:
            # Also when a step with prefill takes less time than its decoding rows alone should.
            self._decode.learn(_decode(load), seconds - decode, unit)

    def decode_seconds(self, load: Load) -> float:
        """Expected seconds of the step with one token per row; 0 when nothing is known."""
        while self._unlearned:
            self._learn(*self._unlearned.popleft())
        return self._decode.of(_decode(load))

    def prefill_seconds(self, load: Load) -> float:
        """Expected seconds that its prefill adds; 0 without any, or when nothing is known."""
        return self._prefill.of(_prefill(load))

    def draft_seconds(self, load: Load, begin: bool = True) -> float:
        """Expected seconds that its guesses add; 0 without any, or when nothing is known.

        Args:
            begin: include the fixed cost of running any guesses.
        """
        return self._drafts.of(_drafts(load, begin))

    def prefill_part(self, load: Load, seconds: float) -> float:
        """The part of a step's measured `seconds` that its prefill took.

        All of them when no row decodes; else the excess over the expected seconds of those rows
        alone. Until a decode-only step has been observed, the seconds are divided by numbers of
        tokens.
        """
        if not load.tokens:
            return 0.0
        if not load.rows:
            return seconds
        decode = self.decode_seconds(load) + self.draft_seconds(load)
        if decode <= 0.0:
            return seconds * load.tokens / (load.tokens + load.rows)
        return max(0.0, seconds - decode)

    def room(self, load: Load, first: int, limit: float) -> int:
        """Tokens that one more row may prefill so that the step takes at most `limit` seconds.

        Args:
            load: what the step runs already.
            first: context length of the row's first new token.
            limit: seconds of the whole step.
        Returns:
            >= 0; bounded by what has run before, so that no estimate is extrapolated far.
        """
        bound = max(0, GROWTH * self._longest - load.tokens)
        begun = Load(load.rows, load.rows_context, load.chunks + 1, load.tokens, load.context)
        spare = limit - self.decode_seconds(begun) - self.prefill_seconds(begun)
        spare -= self.draft_seconds(load)
        if spare <= 0.0:
            return 0
        _, token, context = self._prefill.costs
        # n tokens cost  context / 2 * n^2 + each * n : its positive root, in the form that takes
        # no difference of like numbers.
        each = token + context * first
        slope = each + math.sqrt(each * each + 2.0 * context * spare)
        return bound if slope * bound <= 2.0 * spare else int(2.0 * spare / slope)


class _Costs:
    """Non-negative costs of a few features, by recursive least squares with forgetting."""

    def __init__(self, count: int) -> None:
        self.costs = [0.0] * count
        self._known = [[0.0] * count for _ in range(count)]

    def of(self, features: Sequence[float]) -> float:
        """The sum of the features' costs."""
        return sum(f * cost for f, cost in zip(features, self.costs, strict=True))

    def learn(self, features: Sequence[float], error: float, unit: float) -> None:
        """Correct the costs, which were `error` too low for these features.

        Minimises the distance to the costs as they are, measured by what is known of them, and the
        remaining error.

        Args:
            unit: seconds that an error is compared with.
        """
        scaled = [f / unit for f in features]
        for i, line in enumerate(self._known):
            for j in range(len(line)):
                line[j] = FORGET * line[j] + scaled[i] * scaled[j]
            line[i] += DAMPING * scaled[i] * scaled[i]
        pull = [f * error / unit for f in scaled]
        target = [
            sum(k * cost for k, cost in zip(line, self.costs, strict=True)) + p
            for line, p in zip(self._known, pull, strict=True)
        ]
        free = [i for i, line in enumerate(self._known) if line[i] > 0.0]
        while free:
            solved = _solve([[self._known[i][j] for j in free] + [target[i]] for i in free])
            if min(solved) >= 0.0:
                self.costs = [0.0] * len(self.costs)
                for i, cost in zip(free, solved, strict=True):
                    self.costs[i] = cost
                return
            free = [i for i, cost in zip(free, solved, strict=True) if cost > 0.0]


def _solve(lines: list[list[float]]) -> list[float]:
    """Solve A x = b for a symmetric positive definite A; `lines` are the rows of [A b],
    overwritten."""
    count = len(lines)
    for i, pivot in enumerate(lines):
        for line in lines[i + 1 :]:
            factor = line[i] / pivot[i]
            for j in range(i, count + 1):
                line[j] -= factor * pivot[j]
    found = [0.0] * count
    for i in reversed(range(count)):
        line = lines[i]
        known = sum(line[j] * found[j] for j in range(i + 1, count))
        found[i] = (line[count] - known) / line[i]
    return found


def _decode(load: Load) -> tuple[float, float, float]:
    return 1.0, load.rows, load.rows_context


def _prefill(load: Load) -> tuple[float, float, float]:
    return load.chunks, load.tokens, load.context


def _drafts(load: Load, begin: bool = True) -> tuple[float, float, float]:
    return float(begin and load.drafts > 0), load.drafts, load.drafts_context
