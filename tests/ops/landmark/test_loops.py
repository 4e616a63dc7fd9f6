"""Decode steps on the CPU: rows of different lengths, batched and alone, ties, and slots that are
not keys."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import landmark_attention
from cairn.ops.attention import tiles
from cairn.ops.landmark.select_task import STRATEGIES
from cairn.ops.testing import Arguments, Make, check, tolerance_of

SIZE, WINDOW, TOPK, HEADS, DIM = 4, 9, 3, 2, 16
CANDIDATE = WINDOW + SIZE
"""Slots of the shortest row with one more candidate."""


def step(
    make: Make,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    h_r: int = 8,
    counts: tuple[int, ...] = (),
    **options: Any,
) -> Arguments:
    """The tokens in the last slots of every row, one each or `counts`; 4 query heads a KV head."""
    paged = make.paged((*lengths, 30), HEADS, SIZE, DIM, dtype=dtype)
    paged.k_cache[:, :, -1] = torch.nan
    row, slot, _ = paged.queries((*(counts or (1,) * len(lengths)), 0))
    pages, tokens = len(paged.k_cache), row.numel()
    q = make.randn(tokens, 4 * HEADS, DIM, dtype=dtype)
    # Integers, so that rounding cannot change the order of scores.
    z = make.randint(-3, 4, tokens, 4 * HEADS, DIM).to(dtype)
    key = make.randint(-2, 3, pages, h_r, DIM).to(dtype)
    bias = make.randint(0, 5, pages, 4 * HEADS).float() / 4
    unfinished = paged.page_table[torch.arange(len(lengths)), torch.tensor(lengths) // SIZE]
    for pool in (key, bias):
        pool[unfinished.long()] = torch.nan
    where = (row, slot, paged.page_table, WINDOW, TOPK)
    return make.args(q, z, paged.k_cache, paged.v_cache, key, bias, *where, True, **options)


def some(arguments: Arguments, tokens: Tensor) -> Arguments:
    """The same step with only these tokens."""
    q, z, *pools, row, slot = arguments.args[:8]
    given = (q[tokens], z[tokens], *pools, row[tokens], slot[tokens], *arguments.args[8:])
    return Arguments(given, arguments.kwargs)


def chosen(arguments: Arguments) -> str:
    return landmark_attention.choice(*arguments.args, **arguments.kwargs)


def run(arguments: Arguments) -> tuple[Tensor, ...]:
    return landmark_attention(*arguments.args, **arguments.kwargs)


def assert_alone_as_together(arguments: Arguments) -> None:
    """Every token's results are those of a step of its own, to rounding; pages exactly."""
    together = run(arguments)
    for token in range(arguments.args[0].shape[0]):
        alone = some(arguments, torch.tensor([token]))
        assert chosen(alone) == "numba"
        for whole, one in zip(together, run(alone), strict=True):
            rtol, atol = tolerance_of(landmark_attention, arguments, one.dtype)
            torch.testing.assert_close(whole[token], one[0], rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_of_the_first_pages(dtype: torch.dtype) -> None:
    for length in range(1, 12 * SIZE):
        arguments = step(Make(seed=length), (length,), dtype)
        assert chosen(arguments) == "numba"
        check(landmark_attention, "numba", arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_all_lengths_decode_as_each_alone(seed: int, dtype: torch.dtype) -> None:
    """Lengths at page boundaries, without candidates, with fewer than topk and with many; some rows
    have no token."""
    chance = random.Random(seed)
    edges = (1, SIZE - 1, SIZE, SIZE + 1, CANDIDATE - 1, CANDIDATE, CANDIDATE + TOPK * SIZE)
    lengths = [chance.choice(edges) for _ in range(4)]
    lengths += [SIZE * chance.randint(5, 60) + chance.randint(-1, 1) for _ in range(6)]
    chance.shuffle(lengths)
    arguments = step(Make(seed=seed), tuple(lengths), dtype)
    check(landmark_attention, "numba", arguments)
    assert_alone_as_together(arguments)
    active = some(arguments, torch.tensor(chance.sample(range(10), 7)))
    assert chosen(active) == "numba"
    check(landmark_attention, "numba", active)


def test_rows_that_have_fewer_candidates_than_topk() -> None:
    """Some of them so few that what stands in for the missing ones would lie behind their slots."""
    arguments = step(Make(), (CANDIDATE, 20 * SIZE, CANDIDATE + 2 * SIZE + 1, 7), torch.float32)
    given = Arguments((*arguments.args[:10], 25, True), arguments.kwargs)
    held = run(given)[1].ge(0).sum(dim=-1)
    assert held.tolist() == [[n, n] for n in (1, 17, 3, 0)]
    check(landmark_attention, "numba", given)
    assert_alone_as_together(given)


def test_all_rows_without_a_candidate() -> None:
    arguments = step(Make(), (1, SIZE, SIZE + 2, WINDOW), torch.float32)
    assert run(arguments)[1].eq(-1).all()
    check(landmark_attention, "numba", arguments)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("h_r", [HEADS, 4 * HEADS])
@pytest.mark.parametrize("lengths", [(50,), (50, 5, 90, 51)], ids=["one", "several"])
def test_strategies_and_summaries_of_a_kv_head(
    lengths: tuple[int, ...], strategy: str, h_r: int
) -> None:
    arguments = step(Make(), lengths, torch.float32, h_r, strategy=strategy, scale=0.5)
    if strategy == "group":
        given = (*arguments.args[:5], None, *arguments.args[6:])
        assert chosen(Arguments(given, arguments.kwargs)) == "composed"
        return
    check(landmark_attention, "numba", arguments)


def test_of_equal_pages_the_first_are_taken() -> None:
    arguments = step(Make(), (40 * SIZE, 30 * SIZE), torch.float32)
    arguments.args[4].fill_(1)
    arguments.args[5].zero_()
    indices = landmark_attention.using("numba")(*arguments.args)[1]
    assert indices.tolist() == [[[0, 1, 2]] * HEADS] * 2


def test_landmarks_store_the_summaries_of_their_pages_first() -> None:
    arguments = step(Make(), (10 * SIZE, 50, 8 * SIZE), torch.float32, store_summaries=True)
    check(landmark_attention, "numba", arguments)
    key, bias = arguments.args[4:6]
    pages = arguments.args[8][[0, 2], [9, 7]].long()
    before = key[pages].clone(), bias[pages].clone()
    run(arguments)
    for was, now in zip(before, (key[pages], bias[pages]), strict=True):
        assert all(not torch.equal(a, b) for a, b in zip(was, now, strict=True))


def test_tokens_of_one_row_are_as_each_alone() -> None:
    arguments = step(Make(), (50, 88), torch.float32, counts=(2, 3))
    assert chosen(arguments) == "numba"
    assert_alone_as_together(arguments)


def test_a_wide_step_of_single_tokens_is_a_decode_step_and_a_prefill_is_none() -> None:
    rows = tiles.FEW_TOKENS + 3
    decode = step(Make(), tuple(range(20, 20 + rows)), torch.float32)
    assert chosen(decode) == "numba"
    check(landmark_attention, "numba", decode)
    assert chosen(step(Make(), (90,), torch.float32, counts=(rows,))) == "composed"


def test_pages_that_move_side_by_side_change_nothing() -> None:
    arguments = step(Make(), (40 * SIZE,), torch.float32)
    q, z, *pools, row, slot, table, window, topk, softmax1 = arguments.args
    before = landmark_attention(*arguments.args)
    held = table[0, :40].long()
    assert (held.diff() != 1).any()
    moved = [pool[held] for pool in pools]
    # Written in place, as the host updates its tables: pages must not be cached between calls.
    table[0, :40] = torch.arange(40)
    given = Make().args(q, z, *moved, row, slot, table, window, topk, softmax1)
    after = landmark_attention(*given.args)
    for was, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, was)
