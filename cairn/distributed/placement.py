"""Placement of experts on ranks: busy experts are replicated, so that ranks get about the same
load.

The method is DeepSeek's expert parallelism load balancer (EPLB, published with DeepSeek-V3): the
experts with the largest load per copy are replicated, and copies are packed greedily; if groups of
experts can be divided between nodes, that is done first, because tokens choose few groups.
Additions: no rank holds an expert twice, packs are assigned to the ranks that already hold most of
them, and a placement is kept unless another one is clearly better.

A placement is [ranks, places] int64: the expert in every place of every rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.specs.experts import trivial_placement

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
WORTH = 0.05
"""Least relative improvement of the ratio of largest to mean load for which experts are moved."""


def copies_of(placement: Ints, experts: int) -> Ints:
    """Number of copies of each expert [experts]."""
    return np.bincount(placement.ravel(), minlength=experts).astype(np.int64)


def imbalance(loads: NDArray[Any], placement: Ints) -> float:
    """Largest load of a rank over the mean load: 1 is the best. Copies of an expert share its
    load [experts] evenly."""
    share = loads / np.maximum(copies_of(placement, len(loads)), 1)
    by_rank = share[placement].sum(axis=1)
    mean = float(by_rank.mean())
    return float(by_rank.max()) / mean if mean else 1.0


def rebalanced(loads: NDArray[Any], today: Ints, groups: int = 1, nodes: int = 1) -> Ints:
    """The placement for these loads, with as many places as now.

    Args:
        loads: [experts], tokens that chose each.
        today: the current placement.
        groups: of experts, of which a token chooses few.
        nodes: over which the ranks are spread evenly, one node after the other.
    """
    ranks, places = today.shape
    hierarchical = nodes > 1 and groups % nodes == 0
    if not hierarchical:
        groups = nodes = 1
    loads, found = loads.astype(np.float64), []
    grouped = np.arange(len(loads)).reshape(groups, -1)
    node_of = packed(loads[grouped].sum(axis=1), nodes)
    for node in range(nodes):
        own = grouped[node_of == node].ravel()
        count = replicated(loads[own], ranks * places // nodes, ranks // nodes)
        copies = np.repeat(np.arange(len(own)), count)
        weight = (loads[own] / count)[copies]
        pack = packed(weight, ranks // nodes)
        packs = np.stack([copies[pack == rank] for rank in range(ranks // nodes)])
        apart(packs, loads[own] / count)
        if has_doubles(packs):
            return today
        mine = slice(node * ranks // nodes, (node + 1) * ranks // nodes)
        found.append(kept_in_place(own[packs], today[mine]))
    best = np.concatenate(found)
    redundant = today.size - len(loads)
    trivial = np.array(trivial_placement(len(loads), ranks, redundant)).reshape(today.shape)
    candidates = [best, kept_in_place(trivial, today)]
    chosen = min(candidates, key=lambda each: imbalance(loads, each))
    worth = imbalance(loads, chosen) <= (1 - WORTH) * imbalance(loads, today)
    return chosen if worth else today


def replicated(loads: Floats, places: int, most: int) -> Ints:
    """Copies of each expert [experts], `places` in all and at most `most` of one: one each, and the
    others in turn to the expert with the largest load per copy (ties: the lower index)."""
    count = np.ones(len(loads), dtype=np.int64)
    for _ in range(places - len(loads)):
        count[np.argmax(np.where(count < most, loads / count, -1.0))] += 1
    return count


def packed(weights: Floats, packs: int) -> Ints:
    """Pack of each item [n], with equally many items per pack: the heaviest item first (ties: the
    lower index), each into the lightest pack that is not full (ties: the lower index)."""
    room = np.full(packs, len(weights) // packs)
    total, pack_of = np.zeros(packs), np.zeros(len(weights), dtype=np.int64)
    for thing in np.argsort(-weights, kind="stable"):
        pack = int(np.argmin(np.where(room > 0, total, np.inf)))
        pack_of[thing], room[pack] = pack, room[pack] - 1
        total[pack] += weights[thing]
    return pack_of


def has_doubles(packs: Ints) -> bool:
    """Whether a pack holds an expert twice."""
    return any(len(np.unique(pack)) < len(pack) for pack in packs)


def apart(packs: Ints, weight: Floats) -> None:
    """Exchange copies, in place, until no pack holds an expert twice or no exchange is possible: a
    second copy is exchanged for the lightest copy of another pack such that neither pack then has a
    duplicate.

    Args:
        packs: [packs, places].
        weight: [experts], load per copy.
    """
    for pack in range(len(packs)):
        for place in range(packs.shape[1]):
            expert = packs[pack, place]
            if expert not in packs[pack, :place]:
                continue
            others = [
                (weight[packs[other, at]], other, at)
                for other in range(len(packs))
                if expert not in packs[other]
                for at in range(packs.shape[1])
                if packs[other, at] not in packs[pack]
            ]
            if others:
                _, other, at = min(others)
                packs[pack, place], packs[other, at] = packs[other, at], expert


def kept_in_place(packs: Ints, today: Ints) -> Ints:
    """Packs [ranks, places] assigned to the ranks that already hold most of them, with experts that
    stay on a rank in their current places, so that only necessary moves remain."""
    ranks, experts = len(packs), 1 + max(packs.max(), today.max())
    held = np.zeros((2, ranks, experts), dtype=np.int64)
    for each, placement in zip(held, (packs, today), strict=True):
        each[np.arange(ranks)[:, None], placement] = 1
    overlap = held[0] @ held[1].T
    found = np.empty_like(today)
    for flat in np.argsort(-overlap.ravel(), kind="stable"):
        pack, rank = divmod(int(flat), ranks)
        if overlap[pack, rank] >= 0:
            found[rank] = _settled(packs[pack], today[rank])
            overlap[pack, :] = overlap[:, rank] = -1
    return found


def _settled(experts: Ints, today: Ints) -> Ints:
    staying = np.isin(today, experts)
    found = today.copy()
    found[~staying] = np.setdiff1d(experts, today)[: int((~staying).sum())]
    return found
