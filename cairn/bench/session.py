"""Runs an engine for a measurement and reads its counters around each phase."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cairn.bench.shapes import kinds_of, write_folder
from cairn.engine.totals import HostTimes
from cairn.errors import CairnError
from cairn.llm import LLM
from cairn.types import SamplingParams

TokenPrompt = dict[str, list[int]]

WORKING_SET, RENEWAL = 3, 0.03
"""Without positions a landmark query depends on little but its token. When prompts repeat a few
tokens, 16 neighbouring queries select about a hundred different pages, as in a trained 7B model."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a folder, or a shape with random weights.

    Attributes:
        model: folder of a model; None for a shape.
        shape: name in SHAPES; used when `model` is None.
        overlap: of a shape: neighbouring queries select much the same pages.
    """

    model: Path | None
    shape: str = "345m"
    overlap: bool = False

    @property
    def name(self) -> str:
        """Its name in records."""
        return self.shape if self.model is None else self.model.name

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its attention kinds."""
        return kinds_of(self.shape if self.model is None else "")

    @property
    def selection(self) -> str:
        """What decides which pages its landmark layers read: "random", "shared" or "trained"."""
        if self.model is not None:
            return "trained"
        return "shared" if self.overlap else "random"

    def prompts(self, count: int, length: int, vocab_size: int, seed: int) -> list[TokenPrompt]:
        """`count` prompts of `length` user tokens, different from each other."""
        if not self.overlap:
            return random_prompts(count, length, vocab_size, seed)
        rng = random.Random(seed)
        return [{"prompt_token_ids": _repetitive(rng, length, vocab_size)} for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Phase:
    """Counters of one stretch of work.

    Attributes:
        steps: steps that ran.
        prefill_tokens, decode_tokens: user tokens that ran.
        generated_tokens: tokens that were sampled.
        prefill_seconds, decode_seconds: as the engine counts them.
        steady: what steps that only decode cost the host.
        queries: queries of landmark layers.
        pages_read, pages_held: pages that they read, pages that dense attention would have read.
        preemptions: rows whose pages were taken back for a while.
        frame_hits, frame_misses: selected pages in host memory that were in frames, and that were
            fetched.
    """

    steps: int
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    steady: HostTimes
    queries: int
    pages_read: int
    pages_held: int
    preemptions: int
    frame_hits: int
    frame_misses: int

    @property
    def host_us(self) -> dict[str, float] | None:
        """Microseconds of the host in a step that only decodes, mean, by what they went into; None
        where no such step ran."""
        if not self.steady.steps:
            return None
        stages = ("plan", "launch", "results", "other")
        return {name: getattr(self.steady, name) / self.steady.steps * 1e6 for name in stages}


COUNTERS = tuple(field.name for field in fields(Phase))


@contextmanager
def open_engine(subject: Subject, backend: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """An engine of the subject, shut down at the end.

    Args:
        subject: folder or shape.
        backend: of a shape one of its kinds; a folder is asked to compute its own weights by
            "hsa" or "dense".
        options: keywords of LLM.
    """
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
        if subject.model is None:
            path = write_folder(Path(folder), subject.shape, backend, subject.overlap)
            llm = LLM(str(path), load_format="random", **_without(options, "load_format"))
        else:
            chosen = _without(options, "attention_backend")
            llm = LLM(str(subject.model), attention_backend=backend, **chosen)
        try:
            yield llm
        finally:
            llm.shutdown()


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[TokenPrompt]:
    """`count` prompts of `length` random user tokens, different from each other."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": rng.choices(range(vocab_size), k=length)} for _ in range(count)]


def _repetitive(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Tokens drawn from a few, of which one is now and then replaced."""
    few = rng.choices(range(vocab_size), k=WORKING_SET)
    tokens = []
    for _ in range(length):
        if rng.random() < RENEWAL:
            few[rng.randrange(WORKING_SET)] = rng.randrange(vocab_size)
        tokens.append(few[rng.randrange(WORKING_SET)])
    return tokens


def run_phase(llm: LLM, prompts: Sequence[TokenPrompt], max_tokens: int) -> Phase:
    """Run the prompts greedily to exactly `max_tokens` tokens each; what the counters gained.

    Raises:
        CairnError: a prompt ended with an error: what it took means nothing then.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    before = _read(llm)
    results = llm.generate(list(prompts), params)
    if any(output.finish_reason == "error" for result in results for output in result.outputs):
        raise CairnError("a prompt ended with an error", "The log says which")
    after = _read(llm)
    return Phase(**{name: after[name] - before[name] for name in COUNTERS})


def _read(llm: LLM) -> dict[str, Any]:
    stats = llm.stats()
    return {name: getattr(stats, name) for name in COUNTERS}


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}
