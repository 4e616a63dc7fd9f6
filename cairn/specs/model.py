"""A decoder model: everything that config.json determines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Self

from cairn.specs.compressed import CompressedSpec
from cairn.specs.ffn import FfnSpec
from cairn.specs.gated_delta import GatedDeltaSpec
from cairn.specs.gqa import GqaSpec
from cairn.specs.layer_list import format_layers
from cairn.specs.mla import MlaSpec
from cairn.specs.quantization import QuantizationSpec
from cairn.specs.vision import VisionSpec

ELEMENT_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

MixerSpec = GqaSpec | MlaSpec | GatedDeltaSpec | CompressedSpec
"""The layer's attention or recurrence, which mixes the tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Norms of the residual stream.

    Attributes:
        eps: added to the mean square.
        unit_offset: they multiply by 1 + w, not by w.
    """

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names of a layer's parts in a checkpoint, behind `model.layers.N.`.

    Attributes:
        mixer, ffn: the two parts.
        mixer_norm, ffn_norm: norms of what the parts read; None: they read the residual stream.
        mixer_out_norm, ffn_out_norm: norms of what the parts add to the stream; None: none.
        mixer_site, ffn_site: what mixes several residual streams around the parts.
    """

    mixer: str = "self_attn"
    ffn: str = "mlp"
    mixer_norm: str | None = "input_layernorm"
    ffn_norm: str | None = "post_attention_layernorm"
    mixer_out_norm: str | None = None
    ffn_out_norm: str | None = None
    mixer_site: str = "hc_attn"
    ffn_site: str = "hc_ffn"


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several parallel residual streams (hyper-connections).

    Attributes:
        count: n.
        norm_eps: of the norm over all streams of a token.
        eps, iterations: of the matrix that mixes streams, see `cairn.ops.mhc_pre`.
        head: checkpoint name of the parameters that join them after the last layer.
    """

    count: int
    norm_eps: float
    eps: float
    iterations: int
    head: str = "hc_head"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x += mixer(norm(x)); x += ffn(norm(x)).

    Attributes:
        mixer: the attention or recurrence.
        ffn: the feed-forward layer after it.
        norm: of both, and of their outputs where those are normed.
        names: in a checkpoint; they say which norms there are.
        streams: residual streams that the parts read and write; None: there is one.
    """

    mixer: MixerSpec
    ffn: FfnSpec
    norm: NormSpec
    names: BlockNames = BlockNames()
    streams: StreamsSpec | None = None


@dataclass(frozen=True, slots=True)
class DraftNames:
    """Names of a draft layer's parts in a checkpoint, behind its prefix.

    Attributes:
        join: the map of [embedded token | hidden state], or two maps of which each has one of these
            and whose results are added.
        token_norm, state_norm: norms of these two.
        norm: of what goes to the head.
        layer: in front of the names of its block.
    """

    join: str | tuple[str, str] = "fc"
    token_norm: str = "pre_fc_norm_embedding"
    state_norm: str = "pre_fc_norm_hidden"
    norm: str = "norm"
    layer: str = "layers.0"


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft layer: it predicts the token after the next one.

    Attributes:
        layer: its block.
        prefix: of the names of its tensors in a checkpoint.
        normed: it reads hidden states after the model's final norm; otherwise those before it, of
            all residual streams.
        names: of its parts.
    """

    layer: LayerSpec
    prefix: str
    normed: bool
    names: DraftNames = DraftNames()


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
        hidden_size: width of the residual stream.
        norm: the final norm.
        tied: the output head is the embedding matrix.
        chunk_size: slots per page the model was trained with, None: any page size is possible.
        landmarks: the last slot of every page is a landmark.
        end_embedding: name of the tensor with the embedding of page ends, where that is not a row
            of the embedding matrix.
        max_model_len: trained context in user tokens.
        layers: one entry per layer.
        draft_layer: the draft layer of the checkpoint; None: none.
        draft: the same if it is used; None: it is not.
        vision: an encoder of images and videos; None: text alone is read.
        dtype: "float32", "bfloat16" or "float16", as the checkpoint says.
        quantization: of the matrices; None: they have the dtype.
        embedding_scale: embedded tokens are multiplied by it, rounded to the dtype of activations.
        prefix: of the names of the decoder's tensors in a checkpoint.
        table, head: names of the embedding, behind the prefix, and of the output head.
        streams: residual streams of all layers; None: there is one.
        ignored: regular expressions of tensors that a checkpoint may hold and nothing here reads.
        eos_token_ids: ids that end an output.
        bos_token_id: id that starts a sequence, None: none.
        resolved: how each field of config.json was settled.
    """

    architecture: str
    vocab_size: int
    embedding_rows: int
    head_rows: int
    hidden_size: int
    norm: NormSpec
    tied: bool
    chunk_size: int | None
    landmarks: bool
    max_model_len: int
    layers: tuple[LayerSpec, ...]
    dtype: str
    draft_layer: DraftSpec | None = None
    draft: DraftSpec | None = None
    vision: VisionSpec | None = None
    end_embedding: str | None = None
    quantization: QuantizationSpec | None = None
    embedding_scale: float = 1.0
    prefix: str = "model."
    table: str = "embed_tokens"
    head: str = "lm_head"
    streams: StreamsSpec | None = None
    ignored: tuple[str, ...] = ()
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
        """Token id of the landmark, the first id after the vocabulary."""
        return self.vocab_size

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The mixer of each layer, and of the draft layer."""
        drafting = () if self.draft is None else (self.draft.layer.mixer,)
        return (*(layer.mixer for layer in self.layers), *drafting)

    @property
    def selecting_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose queries select the pages that they read."""
        return tuple(i for i, mixer in enumerate(self.mixers) if mixer.selects)

    def without_vision(self) -> Self:
        """The same model, reading text alone."""
        if self.vision is None:
            return self
        tensors = "^" + self.vision.prefix.replace(".", r"\.")
        return replace(self, vision=None, ignored=(*self.ignored, tensors))

    @property
    def table_rows(self) -> int:
        """Embedding rows that are ever looked up: the vocabulary and the landmark."""
        return self.vocab_size + self.landmarks


def describe(spec: ModelSpec) -> list[tuple[str, object, str]]:
    """Every resolved field as (name, value in force, where it came from), for printing at load."""
    return [(entry.name, entry.value, entry.source) for entry in spec.resolved]


def describe_layers(spec: ModelSpec, text: Callable[[LayerSpec], str]) -> dict[str, str]:
    """Ranges of layers for which `text` says the same, and what it says: {"0-2,4": ...}."""
    found: dict[str, str] = {}
    for said, group in groupby(enumerate(spec.layers), key=lambda entry: text(entry[1])):
        found[format_layers([i for i, _ in group])] = said
    return found


def selecting_window(spec: ModelSpec) -> int:
    """Slots of the local window of the layers that select pages; 0 without such layers."""
    windows = [
        mixer.window for mixer in spec.mixers if isinstance(mixer, GqaSpec) and mixer.selects
    ]
    return next((window for window in windows if window is not None), 0)
