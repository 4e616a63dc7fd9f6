"""Counts of pages that queries read in layers that select pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cairn.attention.batch import Ints
from cairn.cache.landmarks import SlotMap
from cairn.ops import planning
from cairn.specs.hils import HilsSpec
from cairn.specs.model import MixerSpec

STEPS_COUNTED_AT_ONCE = 256


class PageReads:
    """Pages that the queries of landmark layers read, and pages that dense attention would have
    read. Both follow from the queries' slots: each query selects as many pages as it has
    candidates, up to topk.

    Counted on demand, and in between for many steps at once.

    Args:
        mixers: of all layers; those that select pages count.
        slots: slot and landmark arithmetic.
    """

    def __init__(self, mixers: Sequence[MixerSpec], slots: SlotMap) -> None:
        self._slots = slots
        # Selection settings -> number of layers with them, and their KV heads.
        self._rules: dict[tuple[int, int, str], tuple[int, int]] = {}
        self._kv_heads = 1
        for mixer in mixers:
            if isinstance(mixer, HilsSpec) and mixer.selects:
                key = mixer.local_window, mixer.topk, mixer.strategy
                count, heads = self._rules.get(key, (0, 0))
                self._rules[key] = count + 1, heads + mixer.num_kv_heads
                self._kv_heads = mixer.num_kv_heads
        self._queries = self._window = self._held = self._selected = 0
        self._steps: list[Ints] = []
        self._decoding: list[Ints] = []

    def add(self, slot: Ints) -> None:
        """Count the queries at `slot` [T] of a step."""
        self._steps.append(slot)
        if len(self._steps) == STEPS_COUNTED_AT_ONCE:
            self._count()

    def add_decoding(self, first: Ints) -> None:
        """Count those of rows that decode after `first` [n] tokens, and of landmarks behind."""
        self._decoding.append(first)
        if len(self._decoding) == STEPS_COUNTED_AT_ONCE:
            self._count()

    @property
    def queries(self) -> int:
        """Queries, summed over layers."""
        self._count()
        return self._queries

    @property
    def window(self) -> int:
        """Pages within their windows, summed over queries and layers."""
        self._count()
        return self._window

    @property
    def held(self) -> int:
        """Pages that dense attention would read, likewise."""
        self._count()
        return self._held

    @property
    def selected(self) -> int:
        """Pages that all their KV heads together selected, likewise."""
        self._count()
        return self._selected

    @property
    def selected_by_head(self) -> float:
        """Mean of `selected` over KV heads."""
        return self.selected / self._kv_heads

    def _count(self) -> None:
        steps, size = self._steps, self._slots.page_size
        if self._decoding:
            token = self._slots.slot_of(np.concatenate(self._decoding))
            steps += [token, (token + 1)[self._slots.is_landmark(token + 1)]]
        if not steps:
            return
        slot = torch.from_numpy(np.concatenate(steps))
        self._steps, self._decoding = [], []
        held = int((slot // size + 1).sum())
        for (window, topk, strategy), (layers, heads) in self._rules.items():
            candidates = planning.candidate_pages(slot, size, window, strategy)
            self._queries += layers * len(slot)
            self._held += layers * held
            self._window += layers * (held - int(candidates.sum()))
            self._selected += heads * int(candidates.clamp(max=topk).sum())
