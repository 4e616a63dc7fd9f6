"""Logits of the last positions of a prompt, computed in the engine's own steps.

`prompt_logprobs` would create Python objects for every token of the prompt. Here the prompt runs in
the same chunks through the same runner, and only the last logits are read, so a prompt of a million
tokens costs no more than its prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.cache.paged import Lease, PageCache
from cairn.errors import BadRequest, OutOfMemory
from cairn.llm import LLM
from cairn.runner.logprobs import block_rows
from cairn.runner.staging import send
from cairn.runner.step import PageGrant, RowWork, StepPlan
from cairn.types import SamplingParams

ROW = 0
"""Row of the page table to use, which is free while no request runs."""

Take = Callable[[int, Tensor], object]
"""Called with i and the logits [n, V] float32 of rows i, i + 1, ..., on the device, in order."""


@torch.inference_mode()
def read_tail(
    llm: LLM,
    ids: Sequence[int],
    rows: int,
    take: Take,
    advance: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Run a prompt and pass the logits of its last positions to `take`.

    Args:
        llm: an engine without running requests.
        ids: the prompt, user tokens.
        rows: number of last positions; row i is position len(ids) - rows + i.
        take: called with every block of logits.
        advance: called with the number of tokens of every step.

    Raises:
        BadRequest: an invalid prompt, or one with fewer tokens than `rows`.
        OutOfMemory: the page pool is too small.
    """
    engine = llm.engine
    core, runner, slots = engine.core, engine.runner, engine.slots
    core.check(ids, SamplingParams(max_tokens=1))
    if not 0 < rows <= len(ids):
        raise BadRequest(f"{rows} rows of a prompt of {len(ids)} tokens", "Ask for fewer")
    first = len(ids) - rows
    lease = core.cache.open((), 0)
    try:
        done = 0
        while done < len(ids):
            # Cut chunks as the scheduler does. A landmark at the end may add one slot.
            end = int(slots.tokens_in(slots.slots_for(done) + engine.config.chunked_prefill_size))
            end = min(max(end, done + 1), len(ids))
            grant = _grown(core.cache, lease, int(slots.pages_for(end)))
            work = RowWork(ROW, done, ids[done:end], sample=False)
            layout = runner.rows.lay_out(StepPlan(0, (), (), (grant,), (work,)))
            hidden = runner.model(runner.step_of(layout))
            core.cache.pass_windows(lease, int(slots.complete_pages(end)))
            wanted = np.arange(max(first, done), end)
            index = slots.slot_of(wanted) - slots.slots_for(done)
            block = block_rows(llm.spec.vocab_size)
            for at in range(0, len(index), block):
                (chosen,) = send((index[at : at + block],), hidden.device)
                take(int(wanted[at]) - first, runner.model.logits(hidden[chosen]))
            advance(end - done)
            done = end
    finally:
        core.cache.close(lease)


def _grown(cache: PageCache, lease: Lease, pages: int) -> PageGrant:
    """Extend the lease to `pages` pages. Returns the grant of the new pages."""
    before = len(lease.pages)
    if not cache.grow(lease, pages):
        raise OutOfMemory(
            f"{cache.num_pages} pages do not hold the prompt", "Raise --kv-cache-memory"
        )
    new = tuple(lease.pages[before:])
    return PageGrant(ROW, before, new, tuple(lease.window[-len(new) :] if new else ()))


def tail_logits(llm: LLM, ids: Sequence[int], rows: int) -> Tensor:
    """The logits of `read_tail` as one tensor, [rows, V] float32 on the host."""
    parts: list[Tensor] = []
    read_tail(llm, ids, rows, lambda at, logits: parts.append(logits.float().cpu()))
    return torch.cat(parts)
