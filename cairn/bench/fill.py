"""Fills the prefix cache with random pages, to measure decode at long contexts without prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.attention.compressed import ENTRY
from cairn.attention.mla_format import INDEX_KEY, RECORD
from cairn.bench.session import TokenPrompt
from cairn.cache.pools import CachePools
from cairn.errors import OutOfMemory
from cairn.llm import LLM
from cairn.ops.cache.quantized import form_of, is_quantized, pack

MODERATE = (48, 60)
"""Range of bytes that are 0.5 to 1.5 as e4m3, and 1e-9 to 0.01 as bytes of bfloat16 or float32."""


def fill_pages(llm: LLM, prompts: Sequence[TokenPrompt], left: int = 1) -> None:
    """Put pages of random normal values into the prefix cache for the complete pages before the
    last token of each prompt.

    The cost of a decode step depends on the number of pages, not on their content. Random pages are
    the worst case for selection, because queries select different ones.

    Args:
        llm: the engine.
        prompts: token prompts.
        left: tokens at the end of each prompt that remain to be prefilled, at least 1.

    Raises:
        OutOfMemory: the pool does not hold all prompts.
    """
    cache, pools = llm.engine.core.cache, llm.engine.runner.pools
    # As in a real run, the page pool of window layers holds the pages of one step only.
    block = max(1, llm.engine_config.chunked_prefill_size // cache.slots.page_size)
    for prompt in prompts:
        ids = prompt["prompt_token_ids"]
        tokens = ids[: max(0, len(ids) - left)]
        pages = int(cache.slots.complete_pages(len(tokens)))
        lease = cache.open(tokens, 0)
        try:
            for first in range(0, pages, block):
                last = min(first + block, pages)
                if not cache.grow(lease, last):
                    raise OutOfMemory(
                        f"the pool's {cache.num_pages} pages do not hold all prompts of this cell",
                        "Raise --kv-cache-memory",
                    )
                for group, held in enumerate((lease.pages, lease.window)):
                    _fill(pools, group, held[first - last :])
                if last == pages and cache.states is not None:
                    _fill_state(pools, cache.take_snapshot(lease, last, trailing=False))
                cache.commit(lease, tokens, last * cache.slots.tokens_per_page)
        finally:
            cache.close(lease)


def _fill(pools: CachePools, group: int, pages: Sequence[int]) -> None:
    """Write pages of one group in all layers."""
    for layer, groups in zip(pools.pages, pools.schema.group_of, strict=True):
        for name, tensor in layer.items():
            if groups[name] != group:
                continue
            index = _index(pages, tensor.device)
            if name in (RECORD, ENTRY, INDEX_KEY) and is_quantized(tensor):
                # Random bytes in this range decode to values and scales of moderate size.
                shape = (len(pages), *tensor.shape[1:])
                low, high = MODERATE
                tensor[index] = torch.randint(
                    low, high, shape, dtype=tensor.dtype, device=tensor.device
                )
            else:
                tensor[index] = _random_pages(len(pages), tensor)


def _index(pages: Sequence[int], device: torch.device) -> slice | Tensor:
    """A slice for consecutive pages: writing it is one copy, which is several times as fast into
    host memory as writing by index."""
    first, end = pages[0], pages[-1] + 1
    if pages == list(range(first, end)):
        return slice(first, end)
    return torch.tensor(pages, dtype=torch.int64, device=device)


def _fill_state(pools: CachePools, snapshot: int | None) -> None:
    """Write a snapshot of the states of recurrent layers."""
    if snapshot is None:
        raise OutOfMemory(
            f"{pools.sizes.snapshots} snapshots of recurrent states are too few for the prompts of "
            "this cell",
            "Raise --kv-cache-memory",
        )
    for state in pools.states():
        place = state[pools.first_snapshot + snapshot]
        place.copy_(torch.randn(place.shape, dtype=place.dtype, device=place.device))


def _random_pages(count: int, pool: Tensor) -> Tensor:
    """Pages of random normal values in the format of a pool."""
    shape = (count, *pool.shape[1:])
    if not is_quantized(pool):
        return torch.randn(shape, dtype=pool.dtype, device=pool.device)
    form, dim = form_of(pool)
    return pack(torch.randn(*shape[:-1], dim, device=pool.device), form)
