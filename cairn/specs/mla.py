"""Multi-head latent attention (MLA), with or without an indexer that selects its tokens (DSA)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from cairn.specs.backends import MLA
from cairn.specs.rotary import RotarySpec
from cairn.specs.shares import share


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The lightning indexer: scores all earlier tokens, of which the best are selected
    (DeepSeek-V3.2).

    Attributes:
        num_heads, head_dim: heads and their size; one key a token is shared by all heads.
        rotary: of the first dimensions of queries and keys.
        eps: of the layer norm of keys.
        second_stream: see `cairn.specs.mla_options`.
    """

    num_heads: int
    head_dim: int
    rotary: RotarySpec
    eps: float = 1e-6
    second_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Latent attention in absorbed form: one record [latent | rotated key] a token.

    Attributes:
        num_heads: H.
        q_lora_rank: width of the latent of queries.
        kv_lora_rank: r, width of the latent that is cached.
        nope_dim, rope_dim, value_dim: sizes of a head: without position, rotated, of values.
        rotary: of the rotated part.
        scale: factor of the scores.
        latent_eps: of the norms of both latents.
        bias: projections into latents and the output projection have a bias.
        topk: tokens that a query reads, at most; None: all.
        indexer: selects them; None, where there is a topk: they are those that the nearest layer
            below with an indexer has selected.
        draft_width: see `GqaSpec`.
        backend: name of the attention backend.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary: RotarySpec
    scale: float
    latent_eps: float = 1e-6
    bias: bool = False
    topk: int | None = None
    indexer: IndexerSpec | None = None
    draft_width: int = 0
    backend: str = MLA

    def of_rank(self, ranks: int) -> Self:
        """The heads of one of several ranks; every rank has the latents and the indexer. Raises
        BadConfig if the heads cannot be divided."""
        return replace(self, num_heads=share(self.num_heads, ranks, "query heads"))

    @property
    def selects(self) -> bool:
        """False: its queries select tokens, not pages."""
        return False

    @property
    def record_dim(self) -> int:
        """Elements cached per token."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def description(self) -> str:
        """Description for `cairn inspect`."""
        text = f"latent attention: {self.num_heads} heads over {self.record_dim} numbers a token"
        if self.topk is None:
            return text
        by = "shared from the nearest indexer below" if self.indexer is None else "by an indexer"
        return f"{text}, top {self.topk} tokens {by}"
