"""Asks and scores questions, and computes confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cairn.eval.haystack import Case, Question
from cairn.eval.progress import Bar
from cairn.eval.subject import Answer, Subject

Z = 1.959964
"""Two-sided 95% quantile of the normal distribution."""

Score = Callable[[str, Question], float]
"""(output, question) -> score, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A question with its answer and score.

    Attributes:
        task, length, sample: as in Case.
        index: index of the question in its case.
        question, answer: the question and the subject's answer.
        score: 0 to 1.
    """

    task: str
    length: int
    sample: int
    index: int
    question: Question
    answer: Answer
    score: float


def ask_all(subject: Subject, cases: Sequence[Case], score: Score, name: str) -> list[Scored]:
    """Ask every question of every case, with a progress bar. Results are in the order of `cases`.

    Raises:
        CairnError: the subject failed to answer a question.
    """
    answers: dict[int, list[Answer]] = {}
    right = asked = 0.0
    with Bar(name, sum(case.tokens for case in cases)) as bar:

        def done(case: Case, given: list[Answer]) -> None:
            nonlocal right, asked
            answers[id(case)] = given
            for question, answer in zip(case.questions, given, strict=True):
                right += score(answer.text, question)
            asked += len(given)
            bar.advance(case.tokens, f"{right / asked:.0%} right of {asked:.0f}")

        subject.ask(cases, done)
    return [
        Scored(
            case.task, case.length, case.sample, i, question, answer, score(answer.text, question)
        )
        for case in cases
        for i, (question, answer) in enumerate(zip(case.questions, answers[id(case)], strict=True))
    ]


def wilson(right: float, asked: int) -> tuple[float, float]:
    """The 95% confidence interval of the proportion `right / asked` (Wilson 1927).

    Unlike the normal approximation it is meaningful if all or none are right.
    """
    if asked == 0:
        return 0.0, 1.0
    share, z2 = right / asked, Z * Z
    middle = (share + z2 / (2 * asked)) / (1 + z2 / asked)
    half = Z / (1 + z2 / asked) * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked * asked))
    return max(0.0, middle - half), min(1.0, middle + half)


def cached_share(found: Sequence[Scored]) -> float | None:
    """Share of prompt tokens read from the prefix cache; None if it was not reported."""
    known = [s.answer for s in found if s.answer.cached_tokens is not None]
    total = sum(answer.prompt_tokens for answer in known)
    return round(sum(a.cached_tokens or 0 for a in known) / total, 4) if total else None
