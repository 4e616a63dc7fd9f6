"""What a model is, as frozen values: everything that config.json settles. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerKind = Literal["full", "window", "hils"]
NormWidth = Literal["head", "full"]
SummaryKind = Literal["prior", "mean", "landmark"]
RotaryKind = Literal["standard", "in_range", "hope"]

ELEMENT_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary frequencies of a layer.

    Attributes:
        kind: "standard": theta^(-2c/d) for every pair c. "in_range": standard, with pairs slower
            than 2 pi period_multiplier / context_length left unrotated. "hope": theta^(-c/pairs)
            for the first `pairs` pairs, the others unrotated.
        head_dim: d; there are d/2 pairs.
        theta: base of the frequencies.
        context_length: in slots; "in_range" only.
        period_multiplier: "in_range" only.
        pairs: rotated pairs; "hope" only.
        rounded: cos and sin are rounded to the model's dtype before use.
    """

    kind: RotaryKind
    head_dim: int
    theta: float
    context_length: int = 0
    period_multiplier: float = 1.0
    pairs: int = 0
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        kind: "full" causal, "window" (exactly `window` slots) or "hils" (landmark selection).
        window: slots of the window; None in a "full" layer. A "hils" layer's window is aligned.
        mask_landmarks: keys of landmark slots are invisible.
        rotary: None: queries and keys carry no position.
        qk_norm: width of the norms of queries and keys, None: no norm.
        qk_eps: their epsilon.
        bias: q, k, v and o projections have a bias.
    """

    kind: LayerKind
    window: int | None
    mask_landmarks: bool
    rotary: RotarySpec | None
    qk_norm: NormWidth | None
    qk_eps: float
    bias: bool


@dataclass(frozen=True, slots=True)
class HilsSpec:
    """What the landmark layers of a model share.

    Attributes:
        topk: pages selected per query and KV head.
        window: slots of the local window, aligned down to a page start.
        softmax1: a zero logit joins the page softmax.
        summary: key of a page: "prior" (pooled by the prior query, one per query head), "mean" of
            its keys or the "landmark"'s own key (one per KV head).
        bias: a page has the entropy of its prior pooling as a bias, one per query head.
        shared_query: the prior query is a learned constant, not the landmark's query.
        group_query: the pooled key is one per KV head, by the group's mean prior query.
        lmk_q: projection of the landmark query: "full", "lora" (with the raw query added), or
            None: the attention query itself.
        lora_rank: rank of "lora", else 0.
        lmk_q_norm: width of its norm.
        shared_lmk_q_norm: that norm is the query's, without a tensor of its own.
    """

    topk: int
    window: int
    softmax1: bool
    summary: SummaryKind
    bias: bool
    shared_query: bool = False
    group_query: bool = False
    lmk_q: Literal["full", "lora"] | None = None
    lora_rank: int = 0
    lmk_q_norm: NormWidth = "head"
    shared_lmk_q_norm: bool = False

    @property
    def needs_summary_query(self) -> bool:
        """Pages are pooled by a prior query."""
        return self.bias or self.summary == "prior"


@dataclass(frozen=True, slots=True)
class ResolvedField:
    """One field of config.json after resolution.

    Attributes:
        name: its name in the released schema.
        value: the value in force.
        source: "config", "config (older_key)", "override", "default", or "derived: why".
    """

    name: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder model.

    Attributes:
        architecture: model_type in the released schema.
        vocab_size: V; only ids below it exist for users.
        embedding_rows, head_rows: rows of the stored matrices (padding included).
        hidden_size, intermediate_size: widths of the residual stream and of the MLP.
        num_heads, num_kv_heads, head_dim: h_q, h_kv, d.
        eps: of the block norms and the final norm.
        tied: the output head is the embedding matrix.
        post_norm: norms sit on the outputs of attention and MLP instead of their inputs.
        chunk_size: slots per page the model was trained with, None: any page size will do.
        landmarks: the last slot of every page is a landmark.
        external_landmark: the landmark's embedding is a tensor of its own.
        max_model_len: trained context in user tokens.
        layers: one entry per layer.
        hils: None for a model without landmark layers.
        dtype: "float32", "bfloat16" or "float16", as the checkpoint says.
        eos_token_ids: ids that end an output.
        bos_token_id: id that starts a sequence, None: none.
        resolved: how each field of config.json was settled.
    """

    architecture: str
    vocab_size: int
    embedding_rows: int
    head_rows: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    post_norm: bool
    chunk_size: int | None
    landmarks: bool
    external_landmark: bool
    max_model_len: int
    layers: tuple[LayerSpec, ...]
    hils: HilsSpec | None
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    resolved: tuple[ResolvedField, ...] = field(default=(), compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def page_size(self) -> int | None:
        """Slots per page (a page is a chunk); None: any."""
        return self.chunk_size

    @property
    def landmark_id(self) -> int:
        """Token id of the landmark, the first id no user has."""
        return self.vocab_size

    @property
    def hils_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with landmark selection."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == "hils")

    @property
    def table_rows(self) -> int:
        """Embedding rows that are ever looked up: the vocabulary and the landmark."""
        return self.vocab_size + self.landmarks

    @property
    def summary_heads(self) -> int:
        """Heads of a page's summary key in a landmark layer; 0 without one."""
        if self.hils is None:
            return 0
        per_query_head = self.hils.summary == "prior" and not self.hils.group_query
        return self.num_heads if per_query_head else self.num_kv_heads

    def kv_bytes_per_slot(self, dtype: str | None = None) -> float:
        """Bytes of keys, values and page summaries one slot costs over all layers.

        Args:
            dtype: of the cache; None: the checkpoint's.
        """
        size = ELEMENT_SIZE[dtype or self.dtype]
        total = 2.0 * self.num_layers * self.num_kv_heads * self.head_dim * size
        if self.hils is not None and self.chunk_size:
            # A landmark's own key already lies in the cache; every other summary key is stored.
            key = 0 if self.hils.summary == "landmark" else self.summary_heads * self.head_dim
            bias = 4 * self.num_heads if self.hils.bias else 0
            total += len(self.hils_layers) * (key * size + bias) / self.chunk_size
        return total

    def kv_bytes_per_token(self, dtype: str | None = None) -> float:
        """Bytes one user token costs, its share of the page's landmark slot included."""
        per_slot = self.kv_bytes_per_slot(dtype)
        if self.landmarks and self.chunk_size:
            return per_slot * self.chunk_size / (self.chunk_size - 1)
        return per_slot


def describe(spec: ModelSpec) -> list[tuple[str, object, str]]:
    """Every resolved field as (name, value in force, where it came from), for printing at load."""
    return [(entry.name, entry.value, entry.source) for entry in spec.resolved]
