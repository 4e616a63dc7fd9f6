"""RULER's tasks that need no external data, after their description (Hsieh et al. 2024,
arXiv 2404.06654): retrieval, variable tracking, common words, frequent words.

Haystacks are generated (`cairn.eval.words` instead of essays), so scores are close to those of
other implementations but not equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from cairn.errors import BadRequest
from cairn.eval.haystack import Case, Counter, Question, fitted, hide
from cairn.eval.words import Names, noise, prose

Made = tuple[str, tuple[Question, ...]]

BORDERS = (". ", "\n")
OUTPUT_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
"""Output tokens by task, as configured in the paper; raised for longer answers."""
SPARE_TOKENS = 16

HOPS, EXAMPLE_CHARS = 4, 450
COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
EXAMPLE_TIMES, EXAMPLE_OTHERS = 3, 10
ALPHA, ZETA = 2.0, 1.6449340668
"""Exponent of the word frequencies of the task fwe, and Riemann's zeta function of it."""
DOTS = "...."
FREQUENT = 3


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A needle-in-a-haystack task.

    Attributes:
        haystack: "noise", "prose" or "needles" (distractors only).
        key, value: kind of keys and values: "words", "number" or "uuid".
        keys: number of hidden keys.
        values: number of values of the key that is asked for; the others have one.
        queries: number of keys that are asked for.
    """

    haystack: str = "prose"
    key: str = "words"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1


RETRIEVAL = {
    "niah_single_1": Retrieval("noise"),
    "niah_single_2": Retrieval(),
    "niah_single_3": Retrieval(value="uuid"),
    "niah_multikey_1": Retrieval(keys=4),
    "niah_multikey_2": Retrieval("needles"),
    "niah_multikey_3": Retrieval("needles", key="uuid", value="uuid"),
    "niah_multivalue": Retrieval(values=4),
    "niah_multiquery": Retrieval(keys=4, queries=4),
}


def cases(task: str, length: int, samples: int, seed: int, count: Counter) -> Iterator[Case]:
    """Yield the prompts of a task at a length, one question each.

    Args:
        task: name in RULER_TASKS.
        length: tokens of prompt and output together.
        samples: number of prompts.
        seed: seed of the prompts.
        count: returns the number of tokens of a text.

    Raises:
        BadRequest: an unknown task, or a length that is too short for it.
    """
    for sample in range(samples):
        recipe = _Recipe(task, f"{seed}/{task}/{length}/{sample}", count)
        yield fitted(task, length, sample, recipe.make, count)


def recall(output: str, question: Question) -> float:
    """The paper's score: the share of the right answers that the output contains, ignoring case."""
    text = output.lower()
    return sum(answer.lower() in text for answer in question.answers) / len(question.answers)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A prompt whose length is not yet fixed."""

    task: str
    seed: str
    count: Counter

    def make(self, chars: int) -> Made:
        """Build it with this many characters of filler."""
        rng = random.Random(self.seed)
        if self.task in RETRIEVAL:
            document, text, lead, answers = _retrieval(RETRIEVAL[self.task], chars, rng)
        elif self.task in OTHERS:
            document, text, lead, answers = OTHERS[self.task](chars, rng)
        else:
            raise BadRequest(f"RULER has no task {self.task!r} here")
        room = OUTPUT_TOKENS[self.task.partition("_")[0]]
        room = max(room, self.count(", ".join(answers)) + SPARE_TOKENS)
        return document, (Question(text, lead, answers, room),)


Parts = tuple[str, str, str, tuple[str, ...]]
"""(document, question, lead, answers)."""


def _retrieval(spec: Retrieval, chars: int, rng: random.Random) -> Parts:
    names = Names(rng)
    draw = {"words": names.key, "number": names.number, "uuid": names.uuid}
    kind = f"{spec.value}s"

    def needle(key: str, value: str) -> str:
        return f"One of the special magic {kind} for {key} is: {value}. "

    pairs = [(key, draw[spec.value]()) for key in [draw[spec.key]() for _ in range(spec.keys)]]
    pairs += [(pairs[0][0], draw[spec.value]()) for _ in range(spec.values - 1)]
    hidden = [needle(*pair) for pair in pairs]
    if spec.haystack == "needles":
        distractor = len(needle(draw[spec.key](), draw[spec.value]()))
        filler = "".join(
            needle(draw[spec.key](), draw[spec.value]()) for _ in range(chars // distractor)
        )
    else:
        filler = (noise if spec.haystack == "noise" else prose)(chars, rng)
    text = hide(filler, [(rng.random(), line) for line in hidden], BORDERS)
    asked = [pair[0] for pair in pairs[: spec.queries]]
    answers = tuple(value for key, value in pairs if key in asked)
    wanted = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    several = len(answers) > 1
    what = f"the special magic {kind if several else spec.value} for {wanted}"
    verb, every = ("are", "all ") if several else ("is", "")
    document = (
        f"Some special magic {kind} are hidden within the following text. Make sure to memorize "
        f"them. I will quiz you about the {kind} afterwards.\n{text}"
    )
    question = f"\nWhat {verb} {every}{what} mentioned in the provided text?"
    lead = f" T{what[1:]} mentioned in the provided text {verb}"
    return document, question, lead, answers


def _tracking(chars: int, rng: random.Random) -> Parts:
    """A chain of assignments in noise, in order, after a short solved example."""
    names = Names(rng)
    head = "Memorize and track the chain of variable assignments hidden in the following text.\n\n"
    text, question, lead, found = _chain(names, EXAMPLE_CHARS, rng)
    example = f"{head}{text}{question}{lead} {' '.join(found)}\n\n"
    text, question, lead, found = _chain(names, chars, rng)
    return example + head + text, question, lead, found


def _chain(names: Names, chars: int, rng: random.Random) -> Parts:
    variables = tuple(names.variable() for _ in range(HOPS + 1))
    value = names.number(5)
    lines = [f"VAR {variables[0]} = {value}. "]
    lines += [f"VAR {b} = VAR {a}. " for a, b in pairwise(variables)]
    depths = sorted(rng.random() for _ in lines)
    text = hide(noise(chars, rng), list(zip(depths, lines, strict=True)), BORDERS)
    question = f"\nQuestion: Find all variables that are assigned the value {value} in this text."
    lead = (
        f" Answer: According to the chain of variable assignments in the text above, "
        f"{len(variables)} variables are assigned the value {value}, they are:"
    )
    return text, question, lead, variables


def _common_words(chars: int, rng: random.Random) -> Parts:
    """A numbered list in which ten words are ten times as frequent, after a short solved
    example."""
    names = Names(rng)
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = f"\nQuestion: What are the {COMMON} most common words in the above list?"
    lead = f" Answer: The top {COMMON} words that appear most often in the list are:"
    text, common = _list(names, EXAMPLE_TIMES, EXAMPLE_OTHERS, 1, rng)
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(common, 1))
    example = f"{head}{text}{question}{lead} {numbered}\n\n"
    # An entry of the list takes about a dozen characters, its number included.
    text, common = _list(names, COMMON_TIMES, chars // (12 * OTHER_TIMES), OTHER_TIMES, rng)
    return example + head + text, question, lead, common


def _list(
    names: Names, times: int, others: int, other_times: int, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    common = tuple(names.word() for _ in range(COMMON))
    words = list(common) * times + [names.word() for _ in range(others)] * other_times
    rng.shuffle(words)
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1)), common


def _frequent_words(chars: int, rng: random.Random) -> Parts:
    """Coded words with frequencies proportional to rank ** -ALPHA; dots have the first rank."""
    names = Names(rng)
    total = max(1, chars // 7)
    words: list[str] = []
    ranked: list[str] = []
    while len(words) < total or len(ranked) <= FREQUENT:
        times = round(total / ZETA * (len(ranked) + 1) ** -ALPHA)
        ranked.append(names.code() if ranked else DOTS)
        words += [ranked[-1]] * max(1, times)
    rng.shuffle(words)
    document = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {' '.join(words)}"
    )
    question = (
        f"\nQuestion: Do not provide any explanation. Please ignore the dots '{DOTS}'. What are "
        "the three most frequently appeared words in the above coded text?"
    )
    lead = (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    return document, question, lead, tuple(ranked[1 : FREQUENT + 1])


OTHERS: dict[str, Callable[[int, random.Random], Parts]] = {
    "vt": _tracking,
    "cwe": _common_words,
    "fwe": _frequent_words,
}
