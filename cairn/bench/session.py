"""Engines for measurements, and their counters before and after each phase."""

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

WORKING_SET, REPLACEMENT = 3, 0.03
"""Prompts for `overlap` repeat a few tokens: size of that set, and probability per token that one
of them is replaced. Without positions a landmark query depends mostly on its token, so 16 adjacent
queries then select about a hundred distinct pages, as in a trained 7B model."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured model: a folder, or a shape with random weights.

    Attributes:
        model: folder of a model; None for a shape.
        shape: name in SHAPES; used when `model` is None.
        overlap: for a shape: adjacent queries select mostly the same pages.
    """

    model: Path | None
    shape: str = "345m"
    overlap: bool = False

    @property
    def name(self) -> str:
        """Name in records."""
        return self.shape if self.model is None else self.model.name

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention kinds."""
        return kinds_of(self.shape if self.model is None else "")

    @property
    def selection(self) -> str:
        """Kind of page selection in landmark layers: "random", "shared" or "trained"."""
        if self.model is not None:
            return "trained"
        return "shared" if self.overlap else "random"

    def prompts(self, count: int, length: int, vocab_size: int, seed: int) -> list[TokenPrompt]:
        """`count` different prompts of `length` user tokens."""
        if not self.overlap:
            return random_prompts(count, length, vocab_size, seed)
        rng = random.Random(seed)
        return [{"prompt_token_ids": _repetitive(rng, length, vocab_size)} for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Phase:
    """Differences of the engine's counters over one phase.

    Attributes:
        steps: number of steps.
        prefill_tokens, decode_tokens: user tokens computed.
        generated_tokens: sampled tokens.
        prefill_seconds, decode_seconds: by the engine's clock.
        steady: host times of decode-only steps.
        queries: queries of landmark layers.
        pages_read, pages_held: pages that these queries read, and that dense attention would read.
        preemptions: number of preempted rows.
        frame_hits, frame_misses: selected pages in host memory that were found in frames, and that
            were fetched.
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
        """Mean host time of a decode-only step in microseconds, by stage; None without such
        steps."""
        if not self.steady.steps:
            return None
        stages = ("plan", "launch", "results", "other")
        return {name: getattr(self.steady, name) / self.steady.steps * 1e6 for name in stages}


COUNTERS = tuple(field.name for field in fields(Phase))


@contextmanager
def open_engine(subject: Subject, backend: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """An engine of the subject; it is shut down at the end of the block.

    Args:
        subject: folder or shape.
        backend: attention kind: one of the shape's kinds; for a folder "hsa" or "dense".
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
    """`count` different prompts of `length` random user tokens."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": rng.choices(range(vocab_size), k=length)} for _ in range(count)]


def _repetitive(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Tokens drawn from a set of WORKING_SET tokens, which changes slowly."""
    few = rng.choices(range(vocab_size), k=WORKING_SET)
    tokens = []
    for _ in range(length):
        if rng.random() < REPLACEMENT:
            few[rng.randrange(WORKING_SET)] = rng.randrange(vocab_size)
        tokens.append(few[rng.randrange(WORKING_SET)])
    return tokens


def run_phase(llm: LLM, prompts: Sequence[TokenPrompt], max_tokens: int) -> Phase:
    """Generate exactly `max_tokens` tokens per prompt, greedily; returns the counters' differences.

    Raises:
        CairnError: a prompt ended with an error, so the counters are meaningless.
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
