"""A first prefill and a first decode, so that no user waits for what happens only once."""

from __future__ import annotations

from cairn.attention.base import Counters
from cairn.engine.build import Built
from cairn.errors import BadModel
from cairn.runner.runner import PageReads
from cairn.runner.step import PageGrant, RowOpen, RowWork, StepPlan
from cairn.types import SamplingParams

PAGES = 3
"""Length of the warm-up prompt: complete pages, and a decode that reads them."""


def warm_up(built: Built) -> None:
    """Run two steps in row 0, past the scheduler: its pages, counts and draws stay untouched.

    Raises:
        BadModel: the model's logits are not numbers.
    """
    pages = min(PAGES, built.memory.num_pages)
    length = min(built.slots.tokens_in(pages * built.config.page_size), built.memory.max_model_len)
    prompt = [i % built.spec.vocab_size for i in range(max(1, int(length) - 1))]
    opened = RowOpen(row=0, request_id="warm-up", params=SamplingParams(temperature=0), seed=0)
    grant = PageGrant(row=0, first=0, pages=tuple(range(pages)))
    prefill = RowWork(row=0, first=0, tokens=prompt, sample=True)
    decode = RowWork(row=0, first=len(prompt), tokens=None, sample=True, output_index=1)
    execute = built.core.executor.execute
    first = execute(StepPlan(-3, (), (opened,), (grant,), (prefill,)))
    execute(StepPlan(-2, (), (), (), (decode,)))
    execute(StepPlan(-1, (0,), (), (), ()))
    if first.sampled[0].token < 0:
        raise BadModel(
            "the model's logits are NaN or infinite already for a short prompt",
            "Check the weights, or try --dtype float32",
        )
    built.runner.counters = Counters()
    built.runner.reads = PageReads(built.runner.reads.layers)
