"""Documents of an exact length in tokens, with lines hidden at given depths, and questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cairn.demo.document import library_lines
from cairn.errors import BadRequest

Filler = Callable[[int, random.Random], str]
"""(characters, rng) -> text of at most so many characters, a little shorter at most."""

Counter = Callable[[str], int]
"""Tokens of a text."""

PROBE = 2000
"""Characters of the first try, which shows how many a token takes."""
ROUNDS = 8
SLACK = 128
"""A prompt may fall short of its length by one part in so many: a sentence, not more."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a document.

    Attributes:
        text: follows the document.
        lead: the beginning of the answer, which a prompt of plain text goes on with.
        answers: the right ones; how many of them must be found is the task's business.
        max_tokens: of the output.
        depth: where in the document the answer stands, 0 to 1; None: at no single place.
    """

    text: str
    lead: str
    answers: tuple[str, ...]
    max_tokens: int
    depth: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A document and the questions about it.

    Attributes:
        task: name of the task.
        length: tokens that the longest prompt with its output should have.
        sample: number of the document among those of its kind.
        document: text.
        questions: each asked by itself.
        tokens: tokens of all prompts, each with its output at its longest.
    """

    task: str
    length: int
    sample: int
    document: str
    questions: tuple[Question, ...]
    tokens: int = 0


Make = Callable[[int], tuple[str, tuple[Question, ...]]]
"""Characters of filler -> document and questions; always the same for the same number."""


def fitted(task: str, length: int, sample: int, make: Make, count: Counter) -> Case:
    """The case whose longest prompt with its output has `length` tokens, or a few less.

    Raises:
        BadRequest: the task needs more than that.
    """
    chars, low, high, margin = PROBE, 0, 0, 0
    best: Case | None = None
    for _ in range(ROUNDS):
        document, questions = make(chars)
        body = count(document)
        each = [body + count(q.text + q.lead) + q.max_tokens for q in questions]
        left = length - max(each)
        if left >= 0:
            best, low = Case(task, length, sample, document, questions, sum(each)), chars
        else:
            high, margin = chars, length // (2 * SLACK)
        if 0 <= left <= length // SLACK:
            break
        # Estimate from the characters per token so far, or bisect if that failed before. Texts grow
        # by whole sentences: after one too many, aim a little lower.
        chars = max(0, chars + round((left - margin) * len(document) / max(1, body)))
        if chars < low or (high and chars >= high):
            chars = (low + (high or 2 * low)) // 2
    if best is None:
        raise BadRequest(
            f"{length} tokens are too few for the task {task!r}",
            "Give greater --lengths, or name other tasks with --task",
        )
    return best


def hide(filler: str, lines: Sequence[tuple[float, str]], borders: Sequence[str]) -> str:
    """The filler with each line at its depth, behind the nearest border before it.

    Args:
        filler: text.
        lines: (depth from 0 to 1, text with what ends it).
        borders: what ends a line or a sentence of the filler.
    """
    pieces: list[str] = []
    done = 0
    for depth, line in sorted(lines, key=lambda pair: pair[0]):
        end = round(depth * len(filler))
        places = [(filler.rfind(border, done, end), len(border)) for border in borders]
        cut = max((at + size for at, size in places if at >= 0), default=done)
        pieces += [filler[done:cut], line]
        done = cut
    return "".join([*pieces, filler[done:]])


def library(chars: int, rng: random.Random) -> str:
    """Filler out of the standard library's sources."""
    return stretch(_library_text(), chars, rng)


def stretch(text: str, chars: int, rng: random.Random) -> str:
    """A stretch of a text from the start of a random line on; at its end it goes on at the start.

    Raises:
        BadRequest: there is nothing to take from.
    """
    if not text.strip():
        raise BadRequest("the text for the documents is empty", "Give other files")
    start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
    found = text[start : start + chars]
    while len(found) < chars:
        found += text[: chars - len(found)]
    return found


def files_filler(paths: Sequence[Path]) -> Filler:
    """Filler out of files and folders.

    Raises:
        BadRequest: a path that is not there, or no text in any.
    """
    text = "".join(read_texts(paths))
    return lambda chars, rng: stretch(text, chars, rng)


def read_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Texts of files, and of all files below folders in a fixed order; others than UTF-8 left out.

    Raises:
        BadRequest: a path that is not there, or none that holds text.
    """
    some = False
    for path in paths:
        if not path.exists():
            raise BadRequest(f"{path} does not exist")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if text and "\0" not in text:
                some = True
                yield text if text.endswith("\n") else text + "\n"
    if not some:
        raise BadRequest(f"no text in {', '.join(map(str, paths))}", "Give UTF-8 files")


def library_texts() -> Iterator[str]:
    """The standard library's sources, file by file."""
    for _, lines in library_lines():
        yield "".join(line + "\n" for line in lines)


@cache
def _library_text() -> str:
    return "".join(library_texts())
