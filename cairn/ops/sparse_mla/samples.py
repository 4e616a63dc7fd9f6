"""Benchmark sizes of this family's ops: those of DeepSeek-V3.2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from cairn.ops.bench_points import Draw, short


class Sizes(NamedTuple):
    """Sizes of a layer: heads and dim of the indexer, page size, widths of latent and rotary key,
    number of selected keys, width of the query latent."""

    index_heads: int
    index_dim: int
    page: int
    latent: int
    rope: int
    topk: int
    query: int


FULL, TINY = Sizes(64, 128, 64, 512, 64, 2048, 1536), Sizes(4, 32, 16, 128, 16, 32, 48)


class Decode(NamedTuple):
    """A decode step with one token per sequence, each with its own pages in random order."""

    sizes: Sizes
    tokens: int
    context: int
    page_table: Tensor

    @property
    def pages(self) -> int:
        """Number of pages of all sequences."""
        return self.page_table.numel()

    def __str__(self) -> str:
        return f"{self.tokens} x {short(self.context)}"


def is_tiny(draw: Draw) -> bool:
    """Whether the sizes are for tests."""
    return len(draw.layers) == 1


def sizes_of(draw: Draw) -> Sizes:
    """DeepSeek-V3.2's, or small ones for tests."""
    return TINY if is_tiny(draw) else FULL


def token_counts(draw: Draw) -> tuple[int, ...]:
    """Tokens of a step: decoding and prefill."""
    return (7,) if is_tiny(draw) else (64, 8192)


def decode_steps(draw: Draw) -> Iterator[Decode]:
    """Steps of few and of many tokens, over short and long contexts."""
    sizes = sizes_of(draw)
    steps = ((64, 1 << 13), (64, 1 << 15), (64, 1 << 17), (4, 1 << 17), (1, 1 << 17))
    for tokens, context in ((3, 64),) if is_tiny(draw) else steps:
        table = draw.rand(tokens * context // sizes.page).argsort().view(tokens, -1).int()
        yield Decode(sizes, tokens, context, table)
