"""Reports of the pages that selecting layers read for a query, in the form that users see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cairn.attention.base import LayerReads
from cairn.distributed.groups import ALONE, Group
from cairn.types import MAX_SELECTED_PAGES, LayerSelection


def selections(
    reads: Sequence[LayerReads], count: int, group: Group = ALONE
) -> list[tuple[LayerSelection, ...]]:
    """One entry for each of the `count` watched queries, with every such layer in order, of the
    heads of all ranks of a group."""
    layers = [_layer_selections(_of_all_heads(layer, group)) for layer in reads]
    return [tuple(layer[query] for layer in layers) for query in range(count)]


def _of_all_heads(reads: LayerReads, group: Group) -> LayerReads:
    """The selections of the heads of all ranks."""
    pages, weights, window = (
        group.gathered(part).transpose(0, 1).flatten(1, 2)
        for part in (reads.pages, reads.weights, reads.window)
    )
    return LayerReads(reads.layer, pages, weights, window)


def _layer_selections(reads: LayerReads) -> list[LayerSelection]:
    """One entry per query: a page that several KV heads chose is listed once, with the sum of their
    weights."""
    pages: NDArray[np.int64] = reads.pages.cpu().numpy().astype(np.int64)
    weights = reads.weights.cpu().numpy().astype(np.float64)
    window = reads.window.cpu().numpy().mean(axis=1, dtype=np.float64)
    queries, groups, width = pages.shape
    num_heads = weights.shape[1]
    of_group = weights.reshape(queries, groups, num_heads // groups, width).sum(axis=2) / num_heads
    return [
        LayerSelection(reads.layer, *_heaviest(pages[i], of_group[i]), window=float(window[i]))
        for i in range(queries)
    ]


def _heaviest(
    pages: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Pages [h_kv, K] (-1: none) and their weights, summed by page, the heaviest first."""
    chosen = pages >= 0
    found, place = np.unique(pages[chosen], return_inverse=True)
    total = np.bincount(place, weights[chosen], minlength=len(found))
    order = np.argsort(-total, kind="stable")[:MAX_SELECTED_PAGES]
    return tuple(found[order].tolist()), tuple(total[order].tolist())
