"""Datasets: random texts, random texts with shared prefixes, ShareGPT conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cairn.bench.serve.lengths import Lengths
from cairn.errors import BadConfig

DATASETS = ("random", "shared-prefix", "sharegpt")
SHORTEST_TURN = 4


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt with its length in tokens and the number of tokens to ask for."""

    prompt: str
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Options of a dataset. Raises BadConfig for invalid values.

    Attributes:
        name: one of DATASETS.
        path: the file of "sharegpt".
        input_len, output_len: tokens of a random prompt (behind its prefix) and its output.
        range_ratio: lengths are uniform in [len * (1 - ratio), len * (1 + ratio)].
        prefix_len: tokens of a shared prefix.
        prefix_groups: number of different prefixes.
        seed: the same seed gives the same prompts.
    """

    name: str = "random"
    path: Path | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 1024
    prefix_groups: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise BadConfig(f"dataset {self.name!r} is unknown", f"Known: {', '.join(DATASETS)}")
        if (self.path is not None) != (self.name == "sharegpt"):
            hint = "sharegpt needs it, the random datasets take none"
            raise BadConfig(f"--dataset-path does not go with the dataset {self.name!r}", hint)
        if not 0.0 <= self.range_ratio < 1.0:
            raise BadConfig(f"the range ratio must be in [0, 1), not {self.range_ratio}")
        for name in ("input_len", "output_len", "prefix_len", "prefix_groups"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")


class Dataset(Protocol):
    """Unlimited sequence of prompts, by index."""

    async def item(self, index: int) -> Item:
        """The prompt with this number: always the same one for the same seed."""
        ...


@dataclass(frozen=True, slots=True)
class RandomTexts:
    """Independent random texts, after one of the shared prefixes if there are any."""

    options: DatasetOptions
    lengths: Lengths
    prefixes: tuple[tuple[str, int], ...] = ()

    async def item(self, index: int) -> Item:
        """See Dataset."""
        rng = random.Random(f"{self.options.seed}/{index}")
        wanted = _spread(rng, self.options.input_len, self.options.range_ratio)
        output = _spread(rng, self.options.output_len, self.options.range_ratio)
        prefix, before = rng.choice(self.prefixes) if self.prefixes else ("", 0)
        text, tokens = await self.lengths.text(rng, wanted)
        return Item(f"{prefix} {text}" if prefix else text, before + tokens, output)


@dataclass(frozen=True, slots=True)
class Conversations:
    """First turns of recorded conversations in an order drawn by the seed, over and over."""

    items: tuple[Item, ...]

    async def item(self, index: int) -> Item:
        """See Dataset."""
        return self.items[index % len(self.items)]


async def open_dataset(options: DatasetOptions, lengths: Lengths, count: int | None) -> Dataset:
    """The dataset that the options name.

    Args:
        options: which.
        lengths: makes and measures texts.
        count: conversations that will be used at most; None: all.

    Raises:
        BadConfig: a file that cannot be read or holds no usable conversation.
    """
    if options.name == "sharegpt":
        assert options.path is not None
        return Conversations(await _conversations(options, options.path, lengths, count))
    prefixes = []
    if options.name == "shared-prefix":
        for group in range(options.prefix_groups):
            rng = random.Random(f"{options.seed}/prefix/{group}")
            prefixes.append(await lengths.text(rng, options.prefix_len))
    return RandomTexts(options, lengths, tuple(prefixes))


async def _conversations(
    options: DatasetOptions, path: Path, lengths: Lengths, count: int | None
) -> tuple[Item, ...]:
    pairs = list(_pairs(_read(path)))
    random.Random(f"{options.seed}/order").shuffle(pairs)
    items: list[Item] = []
    for question, answer in pairs:
        item = Item(question, await lengths.measure(question), await lengths.measure(answer))
        if min(item.input_len, item.output_len) >= SHORTEST_TURN:
            items.append(item)
        if len(items) == count:
            break
    if not items:
        hint = "It needs a list of objects with `conversations`, a human turn first"
        raise BadConfig(f"{path} holds no usable conversation", hint)
    return tuple(items)


def _read(path: Path) -> Sequence[Any]:
    """A JSON list, or one JSON object per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"the dataset {path} cannot be read: {error}") from error
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        hint = "Give a JSON list, or one JSON object per line"
        raise BadConfig(f"the dataset {path} is not JSON: {error}", hint) from error


def _pairs(entries: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """The first question of each conversation and its answer; others are left out."""
    for entry in entries:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        first, second = turns[:2]
        if not isinstance(first, dict) or not isinstance(second, dict):
            continue
        question, answer = first.get("value"), second.get("value")
        human = first.get("from") in ("human", "user")
        if human and isinstance(question, str) and isinstance(answer, str):
            yield question, answer


def _spread(rng: random.Random, middle: int, ratio: float) -> int:
    return max(1, rng.randint(round(middle * (1 - ratio)), round(middle * (1 + ratio))))
