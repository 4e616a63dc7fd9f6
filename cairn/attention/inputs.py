"""Inputs of attention backends: one type for each kind of mixer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
    """Of attention by landmarks.

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
        k: [T, D], the normed and rotated key of each token.
        weights: [T, Hi] float32, of the heads; factors of the scores are in them.
    """

    q: Tensor
    k: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class MlaInputs:
    """Of latent attention in absorbed form.

    Attributes:
        q: [T, H, r + dr], [latent | rotated] queries.
        latent: [T, r], the normed latent of each token, its value and a part of its key.
        k_pe: [T, dr], the rotated part of its key.
        index: of the layer's own indexer; None: it has none.
    """

    q: Tensor
    latent: Tensor
    k_pe: Tensor
    index: IndexInputs | None = None


@dataclass(frozen=True, slots=True)
class GatedDeltaInputs:
    """Of a gated delta net.

    Attributes:
        qkv: [T, C], projections before convolution and activation: [all q | all k | all v]; they
            are overwritten.
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
