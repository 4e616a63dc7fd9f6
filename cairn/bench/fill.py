"""Long contexts without their prefill: random pages entered in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cairn.bench.session import TokenPrompt
from cairn.errors import OutOfMemory
from cairn.llm import LLM


def fill_pages(llm: LLM, prompts: Sequence[TokenPrompt]) -> None:
    """Make every complete page of the prompts a cache hit, with normal random content.

    The cost of a decode step depends on how many pages there are, not on what they hold; random
    pages are the worst case, for they share nothing.

    Raises:
        OutOfMemory: the pool does not hold all prompts.
    """
    cache, pools = llm.engine.core.cache, llm.engine.runner.pools
    for prompt in prompts:
        tokens = prompt["prompt_token_ids"]
        pages = int(cache.slots.complete_pages(len(tokens)))
        lease = cache.open(tokens, 0)
        try:
            if not cache.grow(lease, pages):
                raise OutOfMemory(
                    f"the pool's {cache.num_pages} pages do not hold all prompts of this cell",
                    "Raise --kv-cache-memory",
                )
            for tensor in pools.tensors():
                index = torch.tensor(lease.pages, device=tensor.device)
                shape = (len(index), *tensor.shape[1:])
                tensor[index] = torch.randn(shape, dtype=tensor.dtype, device=tensor.device)
            cache.commit(lease, tokens, pages * cache.slots.tokens_per_page)
        finally:
            cache.close(lease)
