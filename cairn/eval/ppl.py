"""Runs `cairn eval ppl`: loss on the last tokens of a text, by context length.

The same tokens are predicted at every length, so differences are due to the context alone.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from cairn.errors import BadRequest
from cairn.eval.corpus import excerpts, tokenizer_of
from cairn.eval.logits import read_tail
from cairn.eval.progress import Bar
from cairn.llm import LLM

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PplPlan:
    """Settings of a perplexity evaluation.

    Attributes:
        model: model folder.
        options: keywords of LLM.
        texts: files and folders; empty for the standard library's sources.
        lengths: tokens of context and predicted tokens together. The shortest is the baseline.
        last: number of predicted tokens.
        samples: number of excerpts.

    Raises BadRequest for a length that leaves no context.
    """

    model: Path
    options: Mapping[str, Any]
    texts: tuple[Path, ...] = ()
    lengths: tuple[int, ...] = (4096, 16384)
    last: int = 2048
    samples: int = 4

    def __post_init__(self) -> None:
        if min(self.lengths) <= self.last:
            raise BadRequest(
                f"a length of {min(self.lengths)} leaves no context before {self.last} tokens",
                "Give a larger length, or a smaller --last",
            )


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss on the last tokens of an excerpt: sum in nats, number of tokens, number of bytes."""

    nats: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte, which is comparable between tokenizers."""
        return self.nats / math.log(2) / self.bytes


def run_ppl(plan: PplPlan, keep: Callable[[Record], object]) -> Iterator[Record]:
    """Measure every length. Yields a record for each, after a call of `keep` with it.

    Raises:
        CairnError: an invalid model, option, text or length.
    """
    llm = LLM(plan.model, **plan.options)
    try:
        tokenizer = tokenizer_of(llm)
        lengths = sorted(plan.lengths)
        texts = excerpts(plan.texts, tokenizer, lengths[-1], plan.samples)
        first: list[Loss] = []
        for length in lengths:
            began = time.perf_counter()
            with Bar(f"{length:,} tokens", length * plan.samples) as bar:
                found = []
                for ids in texts:
                    targets = ids[-plan.last :]
                    size = sum(len(tokenizer.token_bytes(token)) for token in targets)
                    nats = tail_nats(llm, ids[-length:], plan.last, bar.advance)
                    found.append(Loss(nats, plan.last, size))
            first = first or found
            record = {
                "shape": plan.model.name,
                "phase": "ppl",
                "texts": [path.name for path in plan.texts] or ["standard library"],
                "options": dict(plan.options),
                "length": length,
                "last": plan.last,
                "samples": plan.samples,
                **summary(found, first),
                "seconds": round(time.perf_counter() - began, 2),
            }
            keep(record)
            yield record
    finally:
        llm.shutdown()


def tail_nats(
    llm: LLM,
    ids: array[int],
    last: int,
    advance: Callable[[int], object] = lambda tokens: None,
) -> float:
    """Sum of -ln p of the last tokens, each given all tokens before it.

    Args:
        llm: an engine without running requests.
        ids: context and predicted tokens.
        last: number of predicted tokens, less than len(ids).
        advance: called with the number of tokens of every step.

    Raises:
        CairnError: as `read_tail`.
    """
    targets = torch.tensor(ids[-last:])
    total = torch.zeros((), dtype=torch.float64)

    def take(at: int, logits: Tensor) -> None:
        wanted = targets[at : at + len(logits)].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
        total.add_(loss.double().sum().cpu())

    read_tail(llm, ids[:-1], last, take, advance)
    return float(total)


def summary(found: Sequence[Loss], first: Sequence[Loss]) -> Record:
    """The loss of a length over all excerpts, compared with the shortest length.

    `more_than_first` is the relative change of the mean bits per byte; `more_error` is its standard
    error over the excerpts, None for a single one.
    """
    nats, tokens, size = (
        sum(loss.nats for loss in found),
        sum(loss.tokens for loss in found),
        sum(loss.bytes for loss in found),
    )
    base = fmean(loss.bits_per_byte for loss in first)
    more = [a.bits_per_byte - b.bits_per_byte for a, b in zip(found, first, strict=True)]
    error = stdev(more) / math.sqrt(len(more)) / base if len(more) > 1 else None
    return {
        "bits_per_byte": round(nats / math.log(2) / size, 5),
        "perplexity": round(math.exp(min(nats / tokens, 700.0)), 5),
        "nats_per_token": round(nats / tokens, 6),
        "bytes_per_token": round(size / tokens, 3),
        "more_than_first": round(fmean(more) / base, 5),
        "more_error": None if error is None else round(error, 5),
        "each_bits_per_byte": [round(loss.bits_per_byte, 5) for loss in found],
    }
