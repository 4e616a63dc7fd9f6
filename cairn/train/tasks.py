"""Random facts to insert into text, and questions about them.

Four kinds: a fact in a line (`#key abcd=48213`, asked by `#ask abcd=`), a fact in an English
sentence, of several forms for statement and question, several such facts asked for at once, and a
chain of variables to follow. Several facts in one text give a task with many keys and queries.
"""

from __future__ import annotations

import itertools
import random
import string
from dataclasses import dataclass

IGNORED, ANSWER = 1, 2
"""Token classes: IGNORED has no loss (random tokens), ANSWER belongs to an answer; text is 0."""

Piece = tuple[str, int]
"""A text and the class of its tokens."""

NOUNS = tuple(
    "magic number,special magic number,secret code,access code,phone number,room number,"
    "order number,lucky number,account number,locker number".split(",")
)
STATEMENTS = (
    "The {noun} for {key} is {value}.",
    "The {noun} of {key} is {value}.",
    "One of the {noun}s for {key} is {value}.",
    "One of the {noun}s for {key} is: {value}.",
    "Remember that the {noun} for {key} is {value}.",
    "Note: {key} was given the {noun} {value}.",
    "{key} has the {noun} {value}.",
)
QUESTIONS = (
    "What is the {noun} for {key}? It is",
    "What is the {noun} of {key}? It is",
    "What is the {noun} for {key}? Answer:",
    "Question: What is the {noun} of {key}?\nAnswer:",
    "Which {noun} does {key} have? {key} has the {noun}",
    "Tell me the {noun} for {key}. The {noun} for {key} is",
    "What is the {noun} for {key} mentioned in the provided text? "
    "The {noun} for {key} mentioned in the provided text is",
    "The {noun} for {key} mentioned in the text above is",
)
SEVERAL = (
    "What are the {noun}s for {keys}? They are",
    "What are all the {noun}s for {keys} mentioned in the provided text? "
    "The {noun}s for {keys} mentioned in the provided text are",
)
CHAINS = (
    "Which number does VAR {key} have in the end? VAR {key} has the number",
    "Variables are set to numbers or to other variables in the text. "
    "Which number does VAR {key} have in the end? VAR {key} has the number",
)
FIRST = tuple("amber brave calm dusty early green happy icy jolly kind lost old quiet red".split())
SECOND = tuple("badger cedar falcon harbor island lantern meadow otter pine river stone".split())


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact: statements to insert, and a question.

    Attributes:
        statements: lines to insert, in any order.
        question: the line that asks, as pieces; its answer is of the class ANSWER.
    """

    statements: tuple[str, ...]
    question: tuple[Piece, ...]


class Facts:
    """Draws facts with distinct keys.

    Args:
        rng: random generator.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()
        self._nouns: dict[str, list[str]] = {}

    def draw(self) -> Fact:
        """A random fact of one of the kinds."""
        chance = self.rng.random()
        if chance < 0.3:
            return self.line()
        if chance < 0.65:
            return self.sentence()
        return self.several() if chance < 0.75 else self.chain()

    def line(self) -> Fact:
        """`#key abcd=48213`, asked by `#ask abcd=`."""
        key, value = self._key(), self._value()
        question = ((f"\n#ask {key}=", IGNORED), (f"{value}\n", ANSWER))
        return Fact((f"\n#key {key}={value}\n",), question)

    def sentence(self) -> Fact:
        """A statement and a question in English; at times about a key with two different nouns."""
        rng, noun = self.rng, self.rng.choice(NOUNS)
        key = self._key(named=True)
        if self._nouns and rng.random() < 0.15:
            known = rng.choice(list(self._nouns))
            # If one noun is a suffix of the other, the question would have two right answers.
            if not any(a.endswith(noun) or noun.endswith(a) for a in self._nouns[known]):
                key = known
        self._nouns.setdefault(key, []).append(noun)
        words = {"noun": noun, "key": key, "value": self._value()}
        asked = rng.choice(QUESTIONS).format(**words)
        return Fact((self._stated(words),), self._asked(asked, words["value"]))

    def several(self) -> Fact:
        """Two to four statements in English and one question about all of them."""
        rng, noun = self.rng, self.rng.choice(NOUNS)
        values = {self._key(named=True): self._value() for _ in range(rng.randrange(2, 5))}
        stated = [
            self._stated({"noun": noun, "key": key, "value": value})
            for key, value in values.items()
        ]
        asked = rng.choice(SEVERAL).format(noun=noun, keys=_listed(list(values)))
        return Fact(tuple(stated), self._asked(asked, _listed(list(values.values()))))

    def chain(self) -> Fact:
        """A chain of two to four links, as lines or assignments."""
        rng = self.rng
        keys, value = [self._key() for _ in range(rng.choice((2, 3, 3, 3, 4)))], self._value()
        if rng.random() < 0.6:
            ends = [*keys[1:], value]
            links = [f"\n#key {a}={b}\n" for a, b in zip(keys, ends, strict=True)]
            answer = "=".join(ends) + "\n"
            return Fact(tuple(links), ((f"\n#run {keys[0]}=", IGNORED), (answer, ANSWER)))
        links = [f"VAR {keys[-1]} = {value}"]
        links += [f"VAR {a} = VAR {b}" for a, b in itertools.pairwise(keys)]
        stated = tuple(self._laid(f"{link}.") for link in links)
        if rng.random() < 0.5:
            return Fact(stated, self._asked(rng.choice(CHAINS).format(key=keys[0]), value))
        asked = f"What is the value of VAR {keys[0]}? VAR {keys[0]} ="
        answer = " = ".join([*(f"VAR {key}" for key in keys[1:]), value])
        return Fact(stated, self._asked(asked, answer))

    def _stated(self, words: dict[str, str]) -> str:
        return self._laid(self.rng.choice(STATEMENTS).format(**words))

    def _laid(self, sentence: str) -> str:
        """Put a sentence on a line of its own or between others."""
        return f"\n{sentence}\n" if self.rng.random() < 0.5 else f" {sentence} "

    def _asked(self, question: str, answer: str) -> tuple[Piece, ...]:
        """The space between question and answer belongs to either of them at random."""
        if self.rng.random() < 0.5:
            return (f"\n{question} ", IGNORED), (f"{answer}.\n", ANSWER)
        return (f"\n{question}", IGNORED), (f" {answer}.\n", ANSWER)

    def _key(self, named: bool = False) -> str:
        rng = self.rng
        while True:
            chance = rng.random() if named else 1.0
            if chance < 0.15:
                key = f"{rng.choice(FIRST)} {rng.choice(SECOND)}"
            elif chance < 0.3:
                key = f"{self._letters()} {self._letters()}"
            else:
                key = self._letters()
            if key not in self._used:
                self._used.add(key)
                return key

    def _letters(self) -> str:
        length = 4 if self.rng.random() < 0.7 else self.rng.randrange(3, 9)
        return "".join(self.rng.choices(string.ascii_lowercase, k=length))

    def _value(self) -> str:
        length = 5 if self.rng.random() < 0.7 else self.rng.randrange(3, 9)
        return "".join(self.rng.choices(string.digits, k=length))


def _listed(words: list[str]) -> str:
    """a, b, and c."""
    return f"{', '.join(words[:-1])}, and {words[-1]}"
