"""Grouped-query attention: all earlier slots, or a window of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from cairn.specs.backends import DENSE, WINDOW
from cairn.specs.rotary import RotarySpec
from cairn.specs.shares import share, share_of_kv_heads

NormWidth = Literal["head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """Softmax attention of h_q query heads over h_kv key-value heads.

    Attributes:
        num_heads, num_kv_heads, head_dim: h_q, h_kv, d.
        rotary: None: no rotary embedding. It may rotate the first dimensions only.
        window: slots that a query sees, its own included; None: all of its sequence.
        scale: of scores; None: d^-1/2.
        mask_landmarks: keys of landmark slots are invisible.
        qk_norm: width of the norms of queries and keys, None: no norm.
        qk_eps: their epsilon.
        unit_offset: the norms multiply by 1 + w, not by w.
        bias: q, k and v projections have a bias.
        out_bias: the output projection has a bias.
        output_gate: each query head has a gate beside it; outputs are multiplied by its sigmoid.
        draft_width: of a draft layer, the width of the hidden states that it reads: slot 0 of its
            cache is not a key, and the cache has the state of the last token of each page. Else 0.
        out_heads: heads that a rank projects, if it computes more; 0: all.
        backend: name of the attention backend that computes it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec | None
    window: int | None = None
    scale: float | None = None
    mask_landmarks: bool = False
    qk_norm: NormWidth | None = None
    qk_eps: float = 1e-6
    unit_offset: bool = False
    bias: bool = False
    out_bias: bool = False
    output_gate: bool = False
    draft_width: int = 0
    out_heads: int = 0
    backend: str = ""

    def __post_init__(self) -> None:
        if not self.backend:
            backend = DENSE if self.window is None else WINDOW
            object.__setattr__(self, "backend", backend)

    def of_rank(self, ranks: int) -> Self:
        """The heads of one of several ranks. Raises BadConfig if they cannot be divided."""
        return replace(
            self,
            num_heads=share(self.num_heads, ranks, "query heads"),
            num_kv_heads=share_of_kv_heads(self.num_kv_heads, ranks),
        )

    @property
    def selects(self) -> bool:
        """Whether queries select pages."""
        return False

    @property
    def aligned(self) -> bool:
        """The window begins at the start of a page."""
        return False

    @property
    def description(self) -> str:
        """Description for `cairn inspect`."""
        return describe_reads(self)


def describe_reads(spec: GqaSpec) -> str:
    """The backend of a layer and the slots that it reads, in words."""
    seen = "all slots" if spec.window is None else f"a window of {spec.window} slots"
    gated = ", outputs gated" if spec.output_gate else ""
    return f"{spec.backend}: {seen}{gated}"
