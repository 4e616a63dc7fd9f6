"""counter_uniform against splitmix64 in Python integers, and its statistics."""

from __future__ import annotations

import math

import torch

from cairn.ops import counter_uniform

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
BINS = 64


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def chi_square(counts: torch.Tensor) -> float:
    """Deviation of equally likely counts from chi-square's mean, in standard deviations."""
    expected = counts.sum().item() / counts.numel()
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_against_python_integers() -> None:
    seeds = [0, 1, -1, 42, (1 << 63) - 1, -(1 << 63), 123456789]
    indices = [0, 1, 2, 1000, (1 << 40) + 3, -5, (1 << 63) - 1]
    pairs = [(s, i) for s in seeds for i in indices]
    seed, index = (torch.tensor(column) for column in zip(*pairs, strict=True))
    got = counter_uniform(seed, index).tolist()
    expected = [(mix(mix(s & MASK) + (i + 1) * GAMMA & MASK) >> 40) * 2.0**-24 for s, i in pairs]
    assert got == expected


def test_numbers_of_one_seed_and_of_one_index_are_uniform() -> None:
    many = 200_000
    counter, fixed = torch.arange(many), torch.full((many,), 7)
    for numbers in (counter_uniform(fixed, counter), counter_uniform(counter, fixed)):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert abs(chi_square(torch.bincount((numbers * BINS).long(), minlength=BINS))) < 4
        low_bits = (numbers * 2**24).long() % BINS
        assert abs(chi_square(torch.bincount(low_bits, minlength=BINS))) < 4


def test_neighbours_are_independent() -> None:
    many = 200_000
    counter = torch.arange(many)
    zero = torch.zeros_like(counter)
    first = (counter_uniform(zero + 3, counter) * 8).long()
    next_index = (counter_uniform(zero + 3, counter + 1) * 8).long()
    next_seed = (counter_uniform(zero + 4, counter) * 8).long()
    for other in (next_index, next_seed):
        assert abs(chi_square(torch.bincount(first * 8 + other, minlength=64))) < 4
