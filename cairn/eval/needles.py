"""Needles: facts hidden at chosen depths, each scored as right or wrong by exact match.

Three tasks in two formats:

    single      one fact in a document
    multi       many keys in a document, one of them at every depth, several asked for
    tracking    a chain of three links; the last one is at the depth, the others anywhere

The format `lines` is that of the embedded model's training data, see its model card. `english` is
for models that follow instructions, and uses the wording of RULER (arXiv 2404.06654).
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cairn.config import default_model_path
from cairn.demo.document import make_facts
from cairn.errors import BadRequest
from cairn.eval.haystack import Case, Counter, Filler, Question, fitted, hide, library
from cairn.eval.options import TASKS
from cairn.eval.words import Names, prose

SPOKEN_TOKENS = 48
"""Maximum output tokens of an answer in English, enough for a sentence around a number."""


@dataclass(frozen=True, slots=True)
class Needle:
    """Lines to hide and the question about them.

    Attributes:
        lines: lines with their terminators; the last one contains the answer.
        question: text after the document.
        lead: beginning of the answer.
        answer: the expected text.
    """

    lines: tuple[str, ...]
    question: str
    lead: str
    answer: str


class Format(ABC):
    """How needles are written and outputs are scored.

    Attributes:
        name: name in FORMATS.
        filler: generates the text around the needles.
        borders: strings that end a line or sentence of the filler, after which needles are
            inserted.
        head: text before the document.
    """

    name: ClassVar[str]
    borders: ClassVar[tuple[str, ...]]
    head: ClassVar[str] = ""

    def __init__(self, filler: Filler) -> None:
        self.filler = filler

    @abstractmethod
    def pairs(self, count: int, rng: random.Random) -> list[Needle]:
        """Generate `count` needles of one line each, with distinct keys."""

    @abstractmethod
    def chains(self, count: int, rng: random.Random) -> list[Needle]:
        """Generate `count` needles of three lines each, with distinct keys."""

    @abstractmethod
    def max_tokens(self, answer: str, count: Counter) -> int:
        """Maximum output length in tokens for an answer."""

    @abstractmethod
    def right(self, output: str, answer: str) -> bool:
        """Whether an output is the expected answer."""


class Lines(Format):
    """Lines such as `#key abcd=48213`, sentences and chains: those of `cairn.demo.document`."""

    name = "lines"
    borders = ("\n",)

    def pairs(self, count: int, rng: random.Random) -> list[Needle]:
        """See Format. Lines and sentences alternate, starting with a random kind."""
        kinds = ("line", "sentence")
        first = rng.randrange(2)
        facts = make_facts(count, rng)
        found = []
        for i in range(count):
            kind = kinds[(first + i) % 2]
            fact = next(fact for fact in facts[3 * i : 3 * i + 3] if fact.kind == kind)
            found.append(Needle((fact.lines[0] + "\n",), fact.question, "", fact.answer))
        return found

    def chains(self, count: int, rng: random.Random) -> list[Needle]:
        """See Format."""
        chains = [fact for fact in make_facts(count, rng) if fact.kind == "chain"]
        return [
            Needle(tuple(line + "\n" for line in fact.lines), fact.question, "", fact.answer)
            for fact in chains
        ]

    def max_tokens(self, answer: str, count: Counter) -> int:
        """See Format. The output is the answer alone."""
        return max(1, count(answer))

    def right(self, output: str, answer: str) -> bool:
        """Whether the output begins with the answer, not followed by a letter or digit."""
        return re.match(re.escape(answer) + r"(?!\w)", output) is not None


class English(Format):
    """Sentences about magic numbers, and variables that are set to each other."""

    name = "english"
    borders = (". ", "\n")
    head = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "them. I will quiz you about the numbers afterwards.\n"
    )

    def pairs(self, count: int, rng: random.Random) -> list[Needle]:
        """See Format. Keys have two words, numbers seven digits."""
        names = Names(rng)
        found = []
        for _ in range(count):
            key, number = names.key(), names.number()
            found.append(
                Needle(
                    (f"One of the special magic numbers for {key} is: {number}. ",),
                    f"\nWhat is the special magic number for {key} mentioned in the provided text?",
                    f" The special magic number for {key} mentioned in the provided text is",
                    number,
                )
            )
        return found

    def chains(self, count: int, rng: random.Random) -> list[Needle]:
        """See Format. Variables are assigned to one another, one of them to a seven-digit
        number."""
        names = Names(rng)
        found = []
        for _ in range(count):
            a, b, c, number = names.variable(), names.variable(), names.variable(), names.number()
            found.append(
                Needle(
                    (f"VAR {a} = VAR {b}. ", f"VAR {b} = VAR {c}. ", f"VAR {c} = {number}. "),
                    f"\nVariables are set to numbers or to other variables in the text. Which "
                    f"number does VAR {a} have in the end?",
                    f" VAR {a} has the number",
                    number,
                )
            )
        return found

    def max_tokens(self, answer: str, count: Counter) -> int:
        """See Format. Enough for a sentence around the number."""
        return SPOKEN_TOKENS

    def right(self, output: str, answer: str) -> bool:
        """Whether the output's first number is the answer; thousands separators are ignored."""
        found = re.search(r"\d[\d,]*", output)
        return found is not None and found[0].replace(",", "") == answer


def choose_format(name: str, model: Path | str, filler: Filler | None) -> Format:
    """Create a format.

    Args:
        name: name in FORMATS. "auto" is `lines` for a model whose README.md shows a question in
            that format and for a server of the embedded model, else `english`.
        model: folder, or the model's name on a server.
        filler: generates the documents; None for source code (`lines`) or generated prose
            (`english`).
    """
    if name == "auto":
        name = "lines" if _knows_lines(model) else "english"
    return Lines(filler or library) if name == "lines" else English(filler or prose)


def _knows_lines(model: Path | str) -> bool:
    if isinstance(model, str):
        return Path(model).name == default_model_path().name
    card = model / "README.md"
    return card.exists() and "#ask " in card.read_text("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class Grid:
    """Tasks, lengths and depths of a needle evaluation.

    Attributes:
        tasks: names in TASKS.
        lengths: tokens of prompt and output together.
        depths: positions in the document, 0 to 1.
        samples: documents per task and length; for `single`, also per depth.
        keys: needles in a document of `multi`. One at each depth is asked for, the others distract.
        seed: seed of the documents.

    Raises BadRequest for invalid values.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 3
    keys: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.depths or not all(0.0 <= depth <= 1.0 for depth in self.depths):
            raise BadRequest(f"depths must lie in 0 to 1, not {self.depths}")
        if "multi" in self.tasks and self.keys < len(self.depths):
            raise BadRequest(
                f"{self.keys} keys cannot stand at {len(self.depths)} depths", "Ask for more keys"
            )


def cases(grid: Grid, form: Format, task: str, length: int, count: Counter) -> Iterator[Case]:
    """Yield the documents of a task at a length.

    Raises:
        BadRequest: the length is too short for the task.
    """
    for sample in range(grid.samples):
        # The task single has one document for each depth; multi asks for all depths in one
        # document.
        for depths in [(d,) for d in grid.depths] if task == "single" else [grid.depths]:
            where = depths if task == "single" else ""
            name = f"{grid.seed}/{task}/{length}/{sample}/{where}"
            recipe = _Recipe(form, task, depths, grid.keys, name, count)
            yield fitted(task, length, sample, recipe.make, count)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A document whose length is not yet fixed."""

    form: Format
    task: str
    depths: Sequence[float]
    keys: int
    seed: str
    count: Counter

    def make(self, chars: int) -> tuple[str, tuple[Question, ...]]:
        """Build document and questions with `chars` characters of filler."""
        rng = random.Random(self.seed)
        form, depths = self.form, self.depths
        if self.task == "tracking":
            needles = form.chains(len(depths), rng)
        else:
            needles = form.pairs(self.keys if self.task == "multi" else 1, rng)
        lines: list[tuple[float, str]] = []
        for i, needle in enumerate(needles):
            lines += [(rng.random(), line) for line in needle.lines[:-1]]
            lines.append((depths[i] if i < len(depths) else rng.random(), needle.lines[-1]))
        questions = tuple(
            Question(
                needle.question,
                needle.lead,
                (needle.answer,),
                form.max_tokens(needle.answer, self.count),
                depth,
            )
            for needle, depth in zip(needles, depths, strict=False)
        )
        return form.head + hide(form.filler(chars, rng), lines, form.borders), questions
