"""Inputs of attention backends: one type for each kind of mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cairn.distributed.groups import ALONE, Group


@dataclass(frozen=True, slots=True)
class GqaInputs:
    """Of grouped-query attention.

    Attributes:
        q: [T, h_q, d].
        k, v: [T, h_kv, d]; None if they are in the cache already, see `BoundLayer.kv_target`.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None


@dataclass(frozen=True, slots=True)
class HilsInputs(GqaInputs):
    """Of landmark attention.

    Attributes:
        lmk_q: [T, h_q, d], the query that scores pages.
        summary_query: [N, h_q, d], the query that pools each completed page, in layers with a
            prior summary; None: the lmk_q of the page's last slot.
    """

    lmk_q: Tensor
    summary_query: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexInputs:
    """Of an indexer.

    Attributes:
        q: [T, Hi, D], rotated queries.
        k: [T, D], the normed and rotated key of each token; None: keys are those of entries.
        weights: [T, Hi] float32, of the heads, including the factors of the scores.
        group: ranks that have the same of all this, and divide the queries.
    """

    q: Tensor
    k: Tensor | None
    weights: Tensor
    group: Group = ALONE


@dataclass(frozen=True, slots=True)
class MlaInputs:
    """Of latent attention in absorbed form.

    Attributes:
        q: [T, H, r + dr], [latent | rotated] queries.
        latent: [T, r], the normed latent of each token, its value and a part of its key.
        k_pe: [T, dr], the rotated part of its key.
        index: of the layer's indexer; None: it has none.
        absorb: writes the latent part of q, which the indexer does not read; None: it is already
            written.
    """

    q: Tensor
    latent: Tensor
    k_pe: Tensor
    index: IndexInputs | None = None
    absorb: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class GatedDeltaInputs:
    """Of a gated delta net.

    Attributes:
        qkv: [T, C], projections before convolution and activation: [all q | all k | all v].
        b, a: [T, hv], of the write strength and of the decay.
        conv_weight: [C, W].
        a_log, dt_bias: [hv] float32.
    """

    qkv: Tensor
    b: Tensor
    a: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class Compression:
    """Parameters of the compression of inputs to entries, see `cairn.ops.compress_windows`.

    Attributes:
        bias: [m, w] float32.
        norm: [d].
        eps: of the norm.
        cos_sin: [T, dr] float32, angles of the first token of the window that each token closes.
    """

    bias: Tensor
    norm: Tensor
    eps: float
    cos_sin: Tensor


@dataclass(frozen=True, slots=True)
class EntryInputs:
    """Of the entries of compressed attention.

    Attributes:
        inputs: [T, F] float32, from which entries are computed: 2 w elements for the entries'
            compression, then those for index keys.
        compression: of entries.
        index: queries and weights of an indexer; None: there is none.
        index_compression: of its keys.
    """

    inputs: Tensor
    compression: Compression
    index: IndexInputs | None = None
    index_compression: Compression | None = None


@dataclass(frozen=True, slots=True)
class CompressedInputs:
    """Of compressed attention.

    Attributes:
        q: [T, H, D], normed and rotated.
        kv: [T, D], the normed and rotated record of each token.
        sink: [H] float32, e^sink is added to the sum that shares are divided by.
        entries: of a layer that has them.
    """

    q: Tensor
    kv: Tensor
    sink: Tensor
    entries: EntryInputs | None = None
