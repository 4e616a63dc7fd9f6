"""`cairn eval ppl`: loss on the last tokens of a text, by length of the context.

The same tokens are predicted at every length, so differences come from the context alone.
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
from cairn.eval.corpus import stretches, tokenizer_of
from cairn.eval.logits import read_tail
from cairn.eval.progress import Bar
from cairn.llm import LLM

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PplPlan:
    """What to run.

    Attributes:
        model: folder.
        options: keywords of LLM.
        texts: files and folders; none: the standard library's sources.
        lengths: tokens of context and predicted tokens together; the shortest is what the others
            are compared with.
        last: tokens that are predicted.
        samples: stretches of text.

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
    """Of the last tokens of one stretch: their sum in nats, their number, and their bytes."""

    nats: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, which do not depend on the tokenizer."""
        return self.nats / math.log(2) / self.bytes


def run_ppl(plan: PplPlan, keep: Callable[[Record], object]) -> Iterator[Record]:
    """Measure every length; gives each as a record when it is done, and `keep` it first.

    Raises:
        CairnError: a model, an option, a text or a length that does not do.
    """
    llm = LLM(plan.model, **plan.options)
    try:
        tokenizer = tokenizer_of(llm)
        lengths = sorted(plan.lengths)
        texts = stretches(plan.texts, tokenizer, lengths[-1], plan.samples)
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
    """Summed -ln p of the last tokens, each after all that stand before it.

    Args:
        llm: an engine with nothing to do.
        ids: context and predicted tokens.
        last: how many are predicted, fewer than there are.
        advance: called with the tokens of every step.

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
    """Of one length: the loss over all stretches, and beside that of the shortest.

    `more_than_first` is relative, from the mean difference in bits per byte; `more_error` is its
    standard error over the stretches, None for a single one.
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
