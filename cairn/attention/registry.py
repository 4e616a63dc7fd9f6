"""Backends by name. To add one, add a file in this folder and its class to the list below."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.attention.base import AttentionBackend
from cairn.attention.batch import Batch, StepRows
from cairn.attention.compressed import CompressedBackend
from cairn.attention.cuts import WHOLE, Cuts, Cutter
from cairn.attention.dense import DenseBackend
from cairn.attention.gated_delta import GatedDeltaBackend
from cairn.attention.hsa import HsaBackend
from cairn.attention.mla import MlaBackend
from cairn.attention.step import BoundLayer, Step
from cairn.attention.window import WindowBackend
from cairn.cache.pools import CachePools
from cairn.cache.schema import CacheSchema, PageFormat
from cairn.specs.model import MixerSpec

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (
        DenseBackend,
        WindowBackend,
        HsaBackend,
        MlaBackend,
        GatedDeltaBackend,
        CompressedBackend,
    )
}


def cache_schema(mixers: Sequence[MixerSpec], form: PageFormat) -> CacheSchema:
    """The cache fields of all layers."""
    layers = [BACKENDS[mixer.backend].needs(mixer, form) for mixer in mixers]
    return CacheSchema(layers, form.page_size)


def most_pages(mixers: Sequence[MixerSpec]) -> int | None:
    """See `AttentionBackend.most_pages`; of all layers."""
    limits = [BACKENDS[mixer.backend].most_pages(mixer) for mixer in mixers]
    return min((limit for limit in limits if limit is not None), default=None)


class Backends:
    """The backends of a model's layers, bound to the cache.

    Args:
        mixers: one entry a layer.
        pools: the cache; made for what `cache_schema` says of these mixers.

    Attributes:
        names: by layer, its backend's name.
        settles: some layer needs the numbers of accepted tokens, see `AttentionBackend.settle`.
        longest_in_graphs: see `AttentionBackend`.
        cutter: chooses the cuts of steps.
    """

    def __init__(self, mixers: Sequence[MixerSpec], pools: CachePools) -> None:
        self.names = [mixer.backend for mixer in mixers]
        self._instances = {
            name: BACKENDS[name](pools, {i: m for i, m in enumerate(mixers) if m.backend == name})
            for name in dict.fromkeys(self.names)
        }
        used = self._instances.values()
        self.settles = pools.schema.has_rows
        limits = [b.longest_in_graphs for b in used if b.longest_in_graphs is not None]
        self.longest_in_graphs = min(limits, default=None)
        fronts = [found for backend in used if (found := backend.fronts())]
        self.cutter = Cutter(fronts[0] if fronts else ())

    def cuts(self, rows: StepRows, on_cpu: bool) -> Cuts:
        """The cuts of a step that runs operation by operation."""
        found = self.cutter.of_step(rows)
        # On the CPU a tile never spans several rows, so splitting the step saves nothing.
        return Cuts(found.chunked) if on_cpu else found

    def bind(self, layer: int, batch: Batch, cuts: Cuts = WHOLE) -> BoundLayer:
        """Plan one layer's part of a step whose rows are not known on the host."""
        backend = self._instances[self.names[layer]]
        return BoundLayer(layer, backend, backend.plan(batch, cuts, None))

    def step(self, batch: Batch, cuts: Cuts = WHOLE, rows: StepRows | None = None) -> Step:
        """Plan a step.

        Args:
            batch: its tensors.
            cuts: the division of its slots.
            rows: its rows as known on the host; None inside a graph.
        """
        plans = {name: b.plan(batch, cuts, rows) for name, b in self._instances.items()}
        layers = [
            BoundLayer(i, self._instances[name], plans[name]) for i, name in enumerate(self.names)
        ]
        return Step(batch, layers)
