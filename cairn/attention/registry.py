"""Backends by name. To add one: a file beside this one, and its class in the list below."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.attention.base import AttentionBackend, AttentionLayer
from cairn.attention.dense import DenseBackend
from cairn.attention.hsa import HsaBackend
from cairn.attention.window import WindowBackend
from cairn.cache.pools import CachePools, CacheSpec

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (DenseBackend, WindowBackend, HsaBackend)
}


def cache_specs(layers: Sequence[AttentionLayer]) -> list[CacheSpec]:
    """What each layer stores per page."""
    return [BACKENDS[layer.backend].needs(layer) for layer in layers]


def assign(
    layers: Sequence[AttentionLayer], pools: CachePools
) -> dict[int, tuple[AttentionBackend, AttentionLayer]]:
    """Layer index -> (its backend bound to the pools, the layer); one instance a backend."""
    instances = {name: BACKENDS[name](pools) for name in {layer.backend for layer in layers}}
    return {layer.index: (instances[layer.backend], layer) for layer in layers}
