"""Texts of a given number of tokens, for a server with unknown vocabulary."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from cairn.bench.serve.client import Server
from cairn.bench.serve.exchange import Request
from cairn.errors import BadConfig

Counter = Callable[[str], Awaitable[int]]

# Common words: one token each in most vocabularies, so that a text's length in tokens is nearly
# proportional to its length in characters.
WORDS = (
    "time year people water work place number house world hand part child eye week case point "
    "company group problem fact name money story month right study book word business issue side "
    "kind head service friend father power hour game line member city community president team "
    "minute idea body back parent face level office door health person art history party result "
    "change morning reason research girl guy moment air teacher force education"
).split()
SHORTEST = min(map(len, WORDS)) + 1

SAMPLE_CHARS = 6000
ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Lengths:
    """Makes random texts by length in tokens.

    Attributes:
        count: tokens of a text.
        tokens_per_char: of random text, measured once.
        source: what counts: "tokenizer", "/tokenize" or "usage".
        exact: count the tokens of each text and correct its length; otherwise use the measured
            ratio.
    """

    count: Counter
    tokens_per_char: float
    source: str
    exact: bool

    def estimate(self, text: str) -> int:
        """Estimated tokens of a text, by the measured ratio."""
        return max(1, round(len(text) * self.tokens_per_char))

    async def measure(self, text: str) -> int:
        """Number of tokens of a text; an estimate unless `exact`."""
        return await self.count(text) if self.exact else self.estimate(text)

    async def text(self, rng: random.Random, tokens: int) -> tuple[str, int]:
        """A random text of `tokens` tokens and how many it really has, as far as that is known.

        With `exact` it is cut or extended a few times until it fits; a vocabulary in which no cut
        gives the number exactly comes out a token or so off.
        """
        text = random_text(rng, round(tokens / self.tokens_per_char))
        if not self.exact:
            return text, tokens
        best, known = text, await self.count(text)
        found = known
        for _ in range(ROUNDS):
            if found == tokens:
                break
            change = round((tokens - found) / self.tokens_per_char)
            text = _resized(rng, text, change or (1 if found < tokens else -1))
            found = await self.count(text)
            if abs(found - tokens) < abs(known - tokens):
                best, known = text, found
        return best, known


async def open_lengths(server: Server, tokenizer: Path | None) -> Lengths:
    """Find out what can count tokens: a tokenizer's folder, /tokenize, or the usage of a request.

    Raises:
        BadConfig: nothing can.
        BadModel: the tokenizer cannot be read.
    """
    sample = random_text(random.Random("sample"), SAMPLE_CHARS)
    if tokenizer is not None:
        counter = _local_counter(tokenizer)
        return Lengths(counter, await counter(sample) / len(sample), "tokenizer", True)
    found = await server.tokenize(sample)
    if found:

        async def ask(text: str) -> int:
            count = await server.tokenize(text)
            if count is None:
                raise BadConfig(f"{server.address.root}/tokenize stopped working")
            return count

        return Lengths(ask, found / len(sample), "/tokenize", True)
    by_usage = await _usage_of(server, sample)

    async def probe(text: str) -> int:
        return await _usage_of(server, text)

    return Lengths(probe, by_usage / len(sample), "usage", False)


def random_text(rng: random.Random, chars: int) -> str:
    """Random words, exactly `chars` characters (at least one)."""
    chars = max(1, chars)
    return " ".join(rng.choices(WORDS, k=chars // SHORTEST + 1))[:chars]


async def _usage_of(server: Server, text: str) -> int:
    """Prompt tokens that the server counts for a text."""
    for chat in (False, True):
        request = Request(text, 0, 1, chat=chat)
        outcome = await server.send(request)
        if outcome.complete and outcome.counted:
            return outcome.input_tokens
    raise BadConfig(
        "the length of a prompt cannot be told: the server has no /tokenize and sends no usage"
        + (f" ({outcome.error}: {outcome.detail})" if outcome.error else ""),
        "Give --tokenizer FOLDER",
    )


def _local_counter(folder: Path) -> Counter:
    from cairn.engine.tokenizer import load_tokenizer

    found = load_tokenizer(folder)
    if found is None:
        raise BadConfig(f"{folder} holds no tokenizer", "Give a folder with tokenizer.json")
    tokenizer = found

    async def count(text: str) -> int:
        return await asyncio.to_thread(lambda: len(tokenizer.encode(text)))

    return count


def _resized(rng: random.Random, text: str, change: int) -> str:
    """The text with characters added at or removed from its end; at least one remains."""
    if change < 0:
        return text[: max(1, len(text) + change)]
    return f"{text} {random_text(rng, change)}"[: len(text) + change]
