"""Builds documents of a given length in tokens, with lines hidden at given depths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cairn.demo.document import library_lines
from cairn.errors import BadRequest

Filler = Callable[[int, random.Random], str]
"""(characters, rng) -> text of at most `characters` characters, and only a little shorter."""

Counter = Callable[[str], int]
"""Returns the number of tokens of a text."""

PROBE = 2000
"""Characters of the first attempt, from which the characters per token are estimated."""
ROUNDS = 8
SLACK = 128
"""A prompt may be shorter than its target length by 1/SLACK of it, about a sentence."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document.

    Attributes:
        text: the question, which follows the document.
        lead: beginning of the answer, which is part of a plain text prompt.
        answers: right answers. The task's score decides how many of them are needed.
        max_tokens: maximum output length.
        depth: position of the answer in the document, 0 to 1; None if it has no single position.
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
        length: target length in tokens of the longest prompt with its output.
        sample: index of the document among those with the same settings.
        document: its text.
        questions: questions, each asked in a separate prompt.
        tokens: tokens of all prompts with their maximum outputs.
    """

    task: str
    length: int
    sample: int
    document: str
    questions: tuple[Question, ...]
    tokens: int = 0


Make = Callable[[int], tuple[str, tuple[Question, ...]]]
"""Characters of filler -> document and questions. Deterministic."""


def fitted(task: str, length: int, sample: int, make: Make, count: Counter) -> Case:
    """Build the case whose longest prompt with its output has `length` tokens or slightly fewer.

    Raises:
        BadRequest: `length` is too short for the task.
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
        # Estimate from the characters per token so far, or bisect if that has failed. Filler grows
        # by whole sentences, so aim lower after a text that was too long.
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
    """Insert lines into a filler text, each after the last border before its depth.

    Args:
        filler: the text.
        lines: pairs of depth (0 to 1) and text, terminator included.
        borders: strings that end a line or a sentence of the filler.
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
    """Filler from the standard library's sources."""
    return excerpt(_library_text(), chars, rng)


def excerpt(text: str, chars: int, rng: random.Random) -> str:
    """Take `chars` characters of a text from the start of a random line, wrapping at the end.

    Raises:
        BadRequest: the text is empty.
    """
    if not text.strip():
        raise BadRequest("the text for the documents is empty", "Give other files")
    start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
    found = text[start : start + chars]
    while len(found) < chars:
        found += text[: chars - len(found)]
    return found


def files_filler(paths: Sequence[Path]) -> Filler:
    """Filler from files and folders.

    Raises:
        BadRequest: a path does not exist, or none contains text.
    """
    text = "".join(read_texts(paths))
    return lambda chars, rng: excerpt(text, chars, rng)


def read_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of files, and of all files below folders, sorted. Skips files that are not
    UTF-8.

    Raises:
        BadRequest: a path does not exist, or none contains text.
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
    """Yield the standard library's sources, file by file."""
    for _, lines in library_lines():
        yield "".join(line + "\n" for line in lines)


@cache
def _library_text() -> str:
    return "".join(library_texts())
