"""Runs `cairn eval needle` and `cairn eval ruler`: builds documents, asks questions, scores
answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cairn.eval import ruler
from cairn.eval.haystack import Filler, Question
from cairn.eval.needles import Format, Grid, cases, choose_format
from cairn.eval.options import VARIANTS
from cairn.eval.score import Scored, ask_all, cached_share, wilson
from cairn.eval.subject import Source

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NeedlePlan:
    """Settings of a needle evaluation.

    Attributes:
        source: the engine or server to evaluate.
        grid: tasks, lengths and depths of the documents.
        form: name in FORMATS.
        filler: text around the needles; None for the format's default.
        variants: names in VARIANTS. Outputs of the others are compared with those of the first.
    """

    source: Source
    grid: Grid
    form: str = "auto"
    filler: Filler | None = None
    variants: tuple[str, ...] = ("base",)


def run_needle(plan: NeedlePlan, keep: Callable[[Record], object]) -> Iterator[list[Record]]:
    """Run the evaluation. Yields the records of each task and length when they are complete.

    Args:
        plan: the settings.
        keep: called with every record at once, to save it.

    Raises:
        CairnError: a length that does not fit, or a question that the subject fails to answer.
    """
    first: dict[tuple[object, ...], str] = {}
    for name in plan.variants:
        variant = VARIANTS[name]
        with plan.source.open(variant.changes, variant.warm) as subject:
            form = choose_format(plan.form, subject.model, plan.filler)
            for length in plan.grid.lengths:
                subject.check(length)
            for length in plan.grid.lengths:
                for task in plan.grid.tasks:
                    made = list(cases(plan.grid, form, task, length, subject.count))
                    began = time.perf_counter()
                    found = ask_all(
                        subject,
                        made,
                        partial(_exact, form),
                        f"{name}: {task} at {length:,}",
                    )
                    shared = {
                        "shape": subject.name,
                        "phase": "needle",
                        "variant": name,
                        "format": form.name,
                        "seed": plan.grid.seed,
                        "options": {**plan.source.options, **variant.changes},
                        "seconds": round(time.perf_counter() - began, 2),
                    }
                    records = [shared | cell for cell in _cells(found, first)]
                    for record in records:
                        keep(record)
                    yield records


def _exact(form: Format, output: str, question: Question) -> float:
    return float(form.right(output, question.answers[0]))


def _cells(found: Sequence[Scored], first: dict[tuple[object, ...], str]) -> Iterator[Record]:
    """Yield one record per depth. The first variant stores its outputs in `first`."""
    for depth in sorted({s.question.depth or 0.0 for s in found}):
        here = [s for s in found if s.question.depth == depth]
        right = sum(s.score for s in here)
        low, high = wilson(right, len(here))
        wrong = [[s.question.answers[0], s.answer.text] for s in here if not s.score]
        same = sum(
            first.setdefault((s.task, s.length, s.sample, s.index, depth), s.answer.text)
            == s.answer.text
            for s in here
        )
        yield {
            "task": here[0].task,
            "length": here[0].length,
            "depth": depth,
            "asked": len(here),
            "right": int(right),
            "accuracy": round(right / len(here), 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "same_as_first": same,
            "prompt_tokens": round(sum(s.answer.prompt_tokens for s in here) / len(here)),
            "cached_share": cached_share(here),
            "wrong": wrong[:3],
        }


@dataclass(frozen=True, slots=True)
class RulerPlan:
    """Settings of a RULER evaluation.

    Attributes:
        source: the engine or server to evaluate.
        tasks: names in RULER_TASKS.
        lengths: tokens of prompt and output together.
        samples: prompts per task and length.
        seed: seed of the prompts.
    """

    source: Source
    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (4096,)
    samples: int = 20
    seed: int = 0


def run_ruler(plan: RulerPlan, keep: Callable[[Record], object]) -> Iterator[Record]:
    """Run the tasks at every length. Yields a record for each, after a call of `keep` with it.

    Raises:
        CairnError: a length that does not fit, or a question that the subject fails to answer.
    """
    with plan.source.open() as subject:
        for length in plan.lengths:
            subject.check(length)
        # Build a prompt of every task at the shortest length first: a length that is too short
        # fails before any request is sent.
        for task in plan.tasks:
            next(ruler.cases(task, min(plan.lengths), 1, plan.seed, subject.count))
        for length in plan.lengths:
            for task in plan.tasks:
                made = list(ruler.cases(task, length, plan.samples, plan.seed, subject.count))
                began = time.perf_counter()
                found = ask_all(subject, made, ruler.recall, f"{task} at {length:,}")
                score = sum(s.score for s in found)
                low, high = wilson(score, len(found))
                record = {
                    "shape": subject.name,
                    "phase": "ruler",
                    "seed": plan.seed,
                    "options": dict(plan.source.options),
                    "task": task,
                    "length": length,
                    "asked": len(found),
                    "score": round(100 * score / len(found), 2),
                    "low": round(100 * low, 2),
                    "high": round(100 * high, 2),
                    "prompt_tokens": round(sum(s.answer.prompt_tokens for s in found) / len(found)),
                    "seconds": round(time.perf_counter() - began, 2),
                    "example": [list(found[0].question.answers), found[0].answer.text],
                }
                keep(record)
                yield record


def totals(records: Sequence[Record]) -> Record:
    """Sum several records: asked, right, accuracy, low, high, same_as_first."""
    asked = sum(r["asked"] for r in records)
    right = sum(r["right"] for r in records)
    low, high = wilson(right, asked)
    same = sum(r["same_as_first"] for r in records)
    return {
        "asked": asked,
        "right": right,
        "accuracy": right / asked if asked else 0.0,
        "low": low,
        "high": high,
        "same_as_first": same,
    }
