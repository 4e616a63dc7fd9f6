"""A decode step of one request on the CPU: every slot of its first pages, ties, what is no key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cairn.ops import landmark_attention
from cairn.ops.landmark.select_task import STRATEGIES
from cairn.ops.testing import Arguments, Make, check, tolerance_of

SIZE, WINDOW, TOPK, HEADS, DIM = 4, 9, 3, 2, 16


def step(make: Make, length: int, dtype: torch.dtype, h_r: int = 8, **options: Any) -> Arguments:
    """The token in the last of `length` slots, with 4 query heads a KV head."""
    paged = make.paged((length, 30), HEADS, SIZE, DIM, dtype=dtype)
    paged.k_cache[:, :, -1] = torch.nan
    row, slot, _ = paged.queries((1, 0))
    pages = len(paged.k_cache)
    q = make.randn(1, 4 * HEADS, DIM, dtype=dtype)
    # Whole numbers: scores that rounding cannot bring into another order.
    z = make.randint(-3, 4, 1, 4 * HEADS, DIM).to(dtype)
    key = make.randint(-2, 3, pages, h_r, DIM).to(dtype)
    bias = make.randint(0, 5, pages, 4 * HEADS).float() / 4
    where = (row, slot, paged.page_table, WINDOW, TOPK)
    return make.args(q, z, paged.k_cache, paged.v_cache, key, bias, *where, True, **options)


def chosen(arguments: Arguments) -> str:
    return landmark_attention.choice(*arguments.args, **arguments.kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_of_the_first_pages(dtype: torch.dtype) -> None:
    for length in range(1, 12 * SIZE):
        arguments = step(Make(seed=length), length, dtype)
        assert chosen(arguments) == "one_token"
        check(landmark_attention, "one_token", arguments)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("h_r", [HEADS, 4 * HEADS])
def test_strategies_and_summaries_of_a_kv_head(strategy: str, h_r: int) -> None:
    arguments = step(Make(), 50, torch.float32, h_r, strategy=strategy, scale=0.3)
    if strategy == "group":
        assert chosen(arguments) == "composed"
        return
    check(landmark_attention, "one_token", arguments)


def test_of_equal_pages_the_first_are_taken() -> None:
    make = Make()
    arguments = step(make, 40 * SIZE, torch.float32)
    arguments.args[4].fill_(1)
    arguments.args[5].zero_()
    indices = landmark_attention.using("one_token")(*arguments.args)[1]
    assert indices.tolist() == [[[0, 1, 2]] * HEADS]


def test_a_landmark_stores_the_summary_of_its_page_first() -> None:
    arguments = step(Make(), 10 * SIZE, torch.float32, store_summaries=True)
    check(landmark_attention, "one_token", arguments)
    page = int(arguments.args[8][0, 9])
    key, bias = arguments.args[4:6]
    before = key[page].clone(), bias[page].clone()
    landmark_attention(*arguments.args, **arguments.kwargs)
    assert not torch.equal(key[page], before[0]) and not torch.equal(bias[page], before[1])


def test_more_tokens_than_one_go_elsewhere() -> None:
    make = Make()
    arguments = step(make, 50, torch.float32)
    q, z, *caches, row, slot, table, window, topk, softmax1 = arguments.args
    where = (row.repeat(2), torch.cat([slot - 1, slot]), table, window, topk, softmax1)
    both = make.args(q.repeat(2, 1, 1), z.repeat(2, 1, 1), *caches, *where)
    assert chosen(both) == "composed"
    together = landmark_attention(*both.args)
    alone = landmark_attention(*arguments.args)
    for two, one in zip(together, alone, strict=True):
        rtol, atol = tolerance_of(landmark_attention, arguments, one.dtype)
        torch.testing.assert_close(two[1:], one, rtol=rtol, atol=atol)


def test_pages_that_move_side_by_side_change_nothing() -> None:
    arguments = step(Make(), 40 * SIZE, torch.float32)
    q, z, *pools, row, slot, table, window, topk, softmax1 = arguments.args
    before = landmark_attention(*arguments.args)
    held = table[0, :40].long()
    assert (held.diff() != 1).any()
    moved = [pool[held] for pool in pools]
    # In the same memory, as the host writes its tables: no earlier pages may be remembered.
    table[0, :40] = torch.arange(40)
    given = Make().args(q, z, *moved, row, slot, table, window, topk, softmax1)
    after = landmark_attention(*given.args)
    for was, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, was)
