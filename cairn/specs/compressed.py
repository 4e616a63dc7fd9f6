"""Attention of all heads over one latent record per token: records in a window, and compressed
entries of earlier tokens (DeepSeek-V4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from cairn.specs.backends import COMPRESSED
from cairn.specs.rotary import RotarySpec
from cairn.specs.shares import share


@dataclass(frozen=True, slots=True)
class CompressionSpec:
    """Compression of earlier tokens to entries.

    Attributes:
        rate: m, tokens of a window; entry e is computed when token (e + 1) m - 1 runs.
        overlap: an entry is also computed from the previous window.
        index_heads, index_dim: heads of the indexer that selects entries, and their size; 0: none,
            and every entry is read.
        topk: entries that a query reads, at most, with an indexer.
    """

    rate: int
    overlap: bool
    index_heads: int = 0
    index_dim: int = 0
    topk: int = 0

    @property
    def reach(self) -> int:
        """Tokens from which an entry is computed, up to the last of its window."""
        return self.rate * (1 + self.overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    """Softmax attention over records, which are keys and values of all heads.

    Attributes:
        num_heads, head_dim: H and D.
        q_lora_rank: width of the latent of queries.
        out_groups, out_rank: outputs of H / out_groups heads are projected together, to out_rank.
        rotary: of the last dimensions of queries, records and entries; outputs are rotated back.
        window: tokens whose records a query reads, its own included.
        eps: of all norms.
        compression: of earlier tokens; None: there are no entries.
        draft_width: see `GqaSpec`; such a layer has no entries.
        backend: name of the attention backend.
    """

    num_heads: int
    head_dim: int
    q_lora_rank: int
    out_groups: int
    out_rank: int
    rotary: RotarySpec
    window: int
    eps: float
    compression: CompressionSpec | None = None
    draft_width: int = 0
    backend: str = COMPRESSED

    def of_rank(self, ranks: int) -> Self:
        """The groups of heads of one of several ranks; every rank has records, entries and the
        indexer. Raises BadConfig if the groups cannot be divided."""
        groups = share(self.out_groups, ranks, "groups of heads")
        return replace(self, num_heads=self.num_heads // ranks, out_groups=groups)

    @property
    def selects(self) -> bool:
        """False: its queries select entries, not pages."""
        return False

    @property
    def scale(self) -> float:
        """Scale of scores."""
        return float(self.head_dim**-0.5)

    @property
    def description(self) -> str:
        """Description for `cairn inspect`."""
        text = f"{self.num_heads} heads over records of {self.head_dim}, window {self.window}"
        own = self.compression
        if own is None:
            return text
        read = f"top {own.topk} of them" if own.index_heads else "all of them"
        return f"{text}, and an entry for {own.rate} tokens, {read}"
