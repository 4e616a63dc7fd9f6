"""Placements of experts: every expert is placed, none twice on a rank, and loads are balanced."""

from __future__ import annotations

import numpy as np
import pytest

from cairn.distributed.placement import has_doubles, imbalance, rebalanced
from cairn.specs.experts import trivial_placement


def trivial(experts: int, ranks: int, redundant: int) -> np.ndarray:
    return np.array(trivial_placement(experts, ranks, redundant)).reshape(ranks, -1)


def test_a_placement_is_whole_and_no_worse_and_stays() -> None:
    rng = np.random.default_rng(0)
    for number in range(40):
        experts, ranks = int(rng.integers(2, 20)), int(rng.choice([1, 2, 3, 4, 8]))
        first = today = trivial(experts, ranks, int(rng.integers(0, experts)))
        if today.shape[1] > experts:
            continue
        loads = (
            rng.zipf(1.5, experts).clip(max=10**6) if number % 2 else rng.integers(0, 5, experts)
        )
        for _ in range(2):
            found = rebalanced(loads, today)
            assert found.shape == today.shape and not has_doubles(found)
            assert set(found.ravel()) == set(range(experts))
            assert imbalance(loads, found) <= imbalance(loads, first) * 1.06
            assert np.array_equal(rebalanced(loads, found), found)
            today, loads = found, rng.permutation(loads)


def test_copies_even_out_a_skewed_load() -> None:
    loads = np.array([30, 1, 1, 1, 1, 1, 1, 1])
    assert imbalance(loads, trivial(8, 4, 0)) == pytest.approx(31 / (37 / 4))
    found = rebalanced(loads, trivial(8, 4, 4))
    assert imbalance(loads, found) < 1.1
    # Experts that a rank keeps do not move.
    changed = rebalanced(loads[::-1], found)
    for before, now in zip(found, changed, strict=True):
        kept = np.isin(before, now)
        assert np.array_equal(before[kept], now[kept])


def test_groups_of_experts_stay_on_a_node() -> None:
    rng = np.random.default_rng(1)
    loads = rng.integers(1, 100, 16)
    found = rebalanced(loads, trivial(16, 4, 4), groups=4, nodes=2)
    groups = [set((node // 4).ravel().tolist()) for node in (found[:2], found[2:])]
    assert groups[0].isdisjoint(groups[1]) and len(groups[0]) == 2
    assert set(found.ravel()) == set(range(16))
