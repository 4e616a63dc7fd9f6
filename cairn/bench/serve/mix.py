"""The mixed load of a soak: short chats, long prompts, shared prefixes, n > 1, stop strings."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cairn.bench.serve.exchange import Request
from cairn.bench.serve.lengths import Lengths
from cairn.errors import BadConfig

PREFIXES = 4
PREFIX_TOKENS = 512
UNSTREAMED = 0.2
STOPS = ("e", " t", "on\n", "zq")

WEIGHTS = {
    "chat": 45,
    "prefix": 20,
    "stop": 15,
    "several": 12,
    "long": 8,
}
"""Kind of request -> its share in percent."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Draws requests of five kinds.

    Attributes:
        lengths: makes the texts.
        long_len: tokens of the longest prompts; those of kind "long" have a quarter of it or more.
        seed: the same seed gives the same requests.
        prefixes: what the requests of kind "prefix" begin with.
    """

    lengths: Lengths
    long_len: int
    seed: int
    prefixes: tuple[str, ...]

    async def request(self, index: int) -> Request:
        """The request with this number; one in five is not streamed."""
        rng = random.Random(f"{self.seed}/{index}")
        kind = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        stream = rng.random() >= UNSTREAMED
        output = rng.randint(1, 64)
        n, wanted, prefix = 1, rng.randint(8, 128), ""
        stop: tuple[str, ...] = ()
        if kind == "prefix":
            prefix = rng.choice(self.prefixes) + " "
        elif kind == "several":
            n = rng.randint(2, 4)
        elif kind == "stop":
            stop = tuple(rng.sample(STOPS, rng.randint(1, len(STOPS))))
        elif kind == "long":
            wanted = rng.randint(self.long_len // 4, self.long_len)
        text, tokens = await self.lengths.text(rng, wanted)
        return Request(
            prompt=prefix + text,
            input_len=tokens + (PREFIX_TOKENS if prefix else 0),
            output_len=output,
            kind=kind,
            chat=kind == "chat",
            stream=stream,
            n=n,
            stop=stop,
            temperature=1.0,
        )


async def open_mix(lengths: Lengths, long_len: int, seed: int) -> Mix:
    """A mix with its shared prefixes made.

    Raises:
        BadConfig: `long_len` is below 64.
    """
    if long_len < 64:
        raise BadConfig(f"the long prompts must have at least 64 tokens, not {long_len}")
    rng = random.Random(f"{seed}/prefixes")
    prefixes = [await lengths.text(rng, PREFIX_TOKENS) for _ in range(PREFIXES)]
    return Mix(lengths, long_len, seed, tuple(text for text, _ in prefixes))
