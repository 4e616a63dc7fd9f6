"""Training batches: slices of text with inserted facts and questions about them.

A batch depends only on the seed and the step, so a run can resume at any step.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
import zlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cairn.errors import BadConfig
from cairn.train.recipe import Recipe, Stage
from cairn.train.tasks import IGNORED, Fact, Facts
from cairn.train.tokens import Array, Vocabulary, make_vocabulary

SUFFIXES = frozenset(
    ".c .cc .cfg .cpp .css .go .h .html .java .js .json .md .py .rs .rst .sh .toml .ts .txt".split()
)
PYTHON_SUFFIXES = frozenset((".md", ".py", ".rst", ".txt"))
"""File types read from installed packages."""
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
HELD_OUT = 40
"""One of this many files is held out from training."""
TOKENS_PER_FACT = 96
"""Least tokens per fact in sequences with many facts."""
TEST_STEP = 1 << 40
"""Number of the first held-out batch."""

_Line: TypeAlias = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of the text in folders.

    Attributes:
        train, held_out: [n] ids.
        files: number of files.
        characters: number of characters.
        checksum: of the text.
    """

    train: Array
    held_out: Array
    files: int
    characters: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Data of one step.

    Attributes:
        ids: [sequences, tokens + 1] int32; the last token is only a target.
        classes: [sequences, tokens + 1] uint8: 0 text, IGNORED or ANSWER.
        topk: number of pages to select.
    """

    ids: Array
    classes: Array
    topk: int


def installed_sources() -> tuple[Path, ...]:
    """Default folders: the standard library and the installed packages."""
    return Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))


def read_files(folder: Path, suffixes: Set[str] = SUFFIXES) -> Iterator[tuple[str, str]]:
    """Name and text of every UTF-8 text file below a folder, in a fixed order."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix not in suffixes or SKIPPED.intersection(name.parts) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield name.as_posix(), text.replace("\r", "") + "\n"


def load_corpus(
    folders: Sequence[Path], tokenizer: str | int, longest: int
) -> tuple[Corpus, Vocabulary]:
    """Read folders and build the recipe's tokenizer.

    Args:
        folders: of text or code; none: `installed_sources`.
        tokenizer: as in Recipe.
        longest: tokens of the longest sequence.

    Raises:
        BadConfig: no such folder, or too little text in it.
    """
    for folder in folders:
        if not folder.is_dir():
            raise BadConfig(f"{folder} is not a folder", "Give a folder of text or code")
    parts: dict[bool, list[str]] = {False: [], True: []}
    files = characters = checksum = 0
    for name, text in _read(folders):
        files += 1
        characters += len(text)
        checksum = zlib.crc32(text.encode(), checksum)
        parts[zlib.crc32(name.encode()) % HELD_OUT == 0].append(text)
    vocabulary = make_vocabulary(tokenizer, parts[False])
    train, held_out = (_encoded(vocabulary, parts[kind]) for kind in (False, True))
    if len(held_out) <= longest:
        # With too few files, hold out the end of the text.
        whole = np.concatenate([train, held_out])
        cut = len(whole) - max(longest + 1, len(whole) // HELD_OUT)
        train, held_out = whole[: max(0, cut)], whole[max(0, cut) :]
    if len(train) <= longest:
        raise BadConfig(
            f"the data hold {len(train) + len(held_out)} tokens in {files} files, "
            f"and a sequence takes {longest}",
            "Give folders with more text",
        )
    return Corpus(train, held_out, files, characters, f"{checksum:08x}"), vocabulary


def _read(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    if folders:
        return itertools.chain.from_iterable(read_files(folder) for folder in folders)
    return itertools.chain.from_iterable(
        read_files(folder, PYTHON_SUFFIXES) for folder in installed_sources()
    )


def _encoded(vocabulary: Vocabulary, texts: list[str]) -> Array:
    found = [vocabulary.encode(text) for text in texts]
    kind = np.uint8 if vocabulary.size <= 256 else np.uint32
    return np.concatenate([np.zeros(0, kind), *(ids.astype(kind) for ids in found)])


class Batches:
    """Builds the batch of a given step.

    Args:
        recipe: the run.
        corpus: its text.
        vocabulary: its tokenizer.
        page_tokens: tokens and slots of a page: (S - 1, S) with landmarks.
    """

    def __init__(
        self, recipe: Recipe, corpus: Corpus, vocabulary: Vocabulary, page_tokens: tuple[int, int]
    ) -> None:
        self.recipe, self.corpus, self.vocabulary = recipe, corpus, vocabulary
        self.page_tokens = page_tokens

    def tokens(self, stage: Stage) -> int:
        """Tokens of a stage's sequence."""
        own, slots = self.page_tokens
        return stage.length // slots * own

    def train(self, step: int) -> Batch:
        """The batch of a step."""
        return self._make(self.recipe.stage_of(step), self.corpus.train, step)

    def held_out(self, stage: Stage, number: int) -> Batch:
        """A batch of held-out text that is not used in training."""
        return self._make(stage, self.corpus.held_out, TEST_STEP + number)

    def _make(self, stage: Stage, text: Array, step: int) -> Batch:
        rng = random.Random(f"{self.recipe.seed}/{step}")
        length = self.tokens(stage) + 1
        rows = [self._sequence(text, length, stage.busy, rng) for _ in range(stage.sequences)]
        ids, classes = (np.stack(column) for column in zip(*rows, strict=True))
        return Batch(ids, classes, rng.choice(stage.topk))

    def _sequence(
        self, text: Array, length: int, busy: float, rng: random.Random
    ) -> tuple[Array, Array]:
        """Ids and classes of one sequence of exactly `length` tokens."""
        is_busy = rng.random() < busy
        most = max(1, length // TOKENS_PER_FACT)
        count = rng.randint(1, most) if is_busy else rng.randint(1, min(3, most))
        draw = Facts(rng)
        # Facts of a busy sequence without a question act as distractors.
        facts = [(draw.draw(), not is_busy or rng.random() < 0.8) for _ in range(count)]
        lines, asked, used = self._lines(facts, length)
        start = rng.randrange(len(text) - length)
        filler = text[start : start + length - used].astype(np.int32)
        return self._woven(filler, lines, asked, rng)

    def _lines(
        self, facts: list[tuple[Fact, bool]], length: int
    ) -> tuple[list[list[_Line]], list[_Line | None], int]:
        """Statements and questions of the facts that fit, and the number of their tokens."""
        statements: list[list[_Line]] = []
        questions: list[_Line | None] = []
        used = 0
        for fact, asked in facts:
            own = [self.vocabulary.encode_pieces([(line, IGNORED)]) for line in fact.statements]
            question = self.vocabulary.encode_pieces(fact.question) if asked else None
            size = sum(len(ids) for ids, _ in own) + (len(question[0]) if question else 0)
            if used + size <= length // 2:
                statements.append(own)
                questions.append(question)
                used += size
        return statements, questions, used

    def _woven(
        self,
        filler: Array,
        statements: list[list[_Line]],
        questions: list[_Line | None],
        rng: random.Random,
    ) -> tuple[Array, Array]:
        """Insert the lines into the text; each question comes after its statements."""
        starts = np.flatnonzero(self.vocabulary.ends_line[filler]) + 1
        if rng.random() < 0.5 or not len(starts):
            starts = np.arange(len(filler) + 1)
        at_end = rng.random() < 0.3
        placed: list[tuple[int, int, float, _Line]] = []
        for own, question in zip(statements, questions, strict=True):
            places = sorted(int(starts[rng.randrange(len(starts))]) for _ in range(len(own) + 1))
            order = rng.sample(own, len(own))
            last = len(filler) if at_end else places[-1]
            # At equal positions, questions sort after statements.
            placed += [
                (p, 0, rng.random(), line) for p, line in zip(places[:-1], order, strict=True)
            ]
            if question is not None:
                placed.append((last, 1, rng.random(), question))
        placed.sort(key=lambda line: line[:3])
        ids: list[Array] = []
        classes: list[Array] = []
        done = 0
        for place, _, _, (line, kinds) in placed:
            ids += [filler[done:place], line]
            classes += [np.zeros(place - done, np.uint8), kinds]
            done = place
        ids.append(filler[done:])
        classes.append(np.zeros(len(filler) - done, np.uint8))
        return np.concatenate(ids), np.concatenate(classes)
