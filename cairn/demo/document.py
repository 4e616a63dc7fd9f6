"""Builds a long document from the standard library's sources, with facts hidden in it."""

from __future__ import annotations

import random
import string
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cairn.errors import BadRequest

# Excluded folders: test data, generated files, installed packages.
SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
)
KEY_LETTERS = 4
VALUE_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Fact:
    """Lines to hide, the question about them, and its answer.

    Attributes:
        kind: "line", "sentence" or "chain".
        lines: lines without newline, each hidden at a different place.
        question: text after the document, which the answer continues.
        answer: the expected text.
    """

    kind: str
    lines: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class HiddenFact:
    """A fact and its place in the document.

    Attributes:
        fact: the fact.
        depths: place of each of its lines, from 0 (start of the document) to 1 (end).
    """

    fact: Fact
    depths: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """ASCII text of an exact length and the facts in it."""

    text: str
    facts: tuple[HiddenFact, ...]
    files: int


def make_facts(per_kind: int, rng: random.Random) -> list[Fact]:
    """Generate `per_kind` facts of each of the three kinds, with distinct keys."""
    used: set[str] = set()

    def key() -> str:
        while True:
            name = "".join(rng.choices(string.ascii_lowercase, k=KEY_LETTERS))
            if name not in used:
                used.add(name)
                return name

    def value() -> str:
        return "".join(rng.choices(string.digits, k=VALUE_DIGITS))

    facts = []
    for _ in range(per_kind):
        name, number = key(), value()
        facts.append(Fact("line", (f"#key {name}={number}",), f"\n#ask {name}=", number))
        name, number = key(), value()
        sentence = f"One of the magic numbers for {name} is {number}."
        question = f"\nWhat is the magic number for {name}? It is "
        facts.append(Fact("sentence", (sentence,), question, number))
        first, second, third, number = key(), key(), key(), value()
        links = (f"#key {first}={second}", f"#key {second}={third}", f"#key {third}={number}")
        answer = f"{second}={third}={number}"
        facts.append(Fact("chain", links, f"\n#run {first}=", answer))
    return facts


def library_lines(root: Path | None = None) -> Iterator[tuple[Path, list[str]]]:
    """Yield path and lines of the ASCII sources below `root` (the standard library), sorted."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            text = path.read_bytes().decode("ascii")
        except (OSError, UnicodeDecodeError):
            continue
        yield path, text.replace("\r", "").splitlines()


def build_document(
    characters: int, facts: list[Fact], rng: random.Random, root: Path | None = None
) -> Document:
    """Build a document of exactly `characters` ASCII characters that contains all facts.

    The document is divided into as many sections as there are lines to hide. Each section gets one
    line, in random order, at the start of a random line.

    Args:
        characters: length including the facts.
        facts: the facts to hide.
        rng: random generator of order and places.
        root: folder of the sources, None for the standard library.

    Raises:
        BadRequest: the sources are too short, or the document is too short for the facts.
    """
    hidden = [line for fact in facts for line in fact.lines]
    rng.shuffle(hidden)
    filler, files = _filler(characters - sum(len(line) + 1 for line in hidden), root)
    starts = _line_starts(filler)
    if len(starts) < 2 * len(hidden):
        raise BadRequest(f"a document of {characters} tokens is too short for {len(facts)} facts")
    pieces: list[str] = []
    depths: dict[str, float] = {}
    done = length = 0
    for i, line in enumerate(hidden):
        first, last = (len(starts) * i // len(hidden), len(starts) * (i + 1) // len(hidden))
        cut = starts[rng.randrange(first, last)]
        pieces += [filler[done:cut], line, "\n"]
        length += cut - done
        depths[line] = length / characters
        length += len(line) + 1
        done = cut
    pieces.append(filler[done:])
    found = tuple(HiddenFact(fact, tuple(depths[line] for line in fact.lines)) for fact in facts)
    return Document("".join(pieces), found, files)


def _filler(characters: int, root: Path | None) -> tuple[str, int]:
    """Exactly `characters` characters of source text, and the number of their files."""
    parts: list[str] = []
    length = 0
    for files, (_, lines) in enumerate(library_lines(root), start=1):
        parts += [line + "\n" for line in lines]
        length += sum(len(line) + 1 for line in lines)
        if length >= characters:
            return "".join(parts)[:characters], files
    raise BadRequest(
        f"the sources on this machine hold {length} characters, fewer than {characters}",
        "Ask for a shorter document",
    )


def _line_starts(text: str) -> list[int]:
    starts = [0]
    while (end := text.find("\n", starts[-1])) >= 0 and end + 1 < len(text):
        starts.append(end + 1)
    return starts
