"""The page allocator: no page has two owners, none is freed twice."""

from __future__ import annotations

import random

import pytest

from cairn.cache.allocator import PageAllocator
from cairn.errors import InvariantError


def test_every_page_once() -> None:
    allocator = PageAllocator(5)
    assert sorted(allocator.take(2) + allocator.take(0) + allocator.take(3)) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0


def test_the_last_page_returned_is_the_first_taken() -> None:
    allocator = PageAllocator(8)
    allocator.take(8)
    allocator.free([3, 6])
    assert allocator.take(1) == [6]


@pytest.mark.parametrize("count", [4, -1])
def test_more_than_is_free_is_refused(count: int) -> None:
    allocator = PageAllocator(3)
    with pytest.raises(InvariantError):
        allocator.take(count)
    assert allocator.num_free == 3


def test_freeing_twice_is_refused() -> None:
    allocator = PageAllocator(3)
    pages = allocator.take(2)
    allocator.free(pages)
    with pytest.raises(InvariantError, match="freed twice"):
        allocator.free(pages[:1])
    with pytest.raises(InvariantError, match="freed twice"):
        PageAllocator(3).free([1])
    assert allocator.num_free == 3


def test_freeing_one_page_twice_in_a_call_is_refused() -> None:
    allocator = PageAllocator(3)
    page = allocator.take(1)[0]
    with pytest.raises(InvariantError, match="freed twice"):
        allocator.free([page, page])


@pytest.mark.parametrize("page", [-1, 3])
def test_unknown_pages_are_refused(page: int) -> None:
    with pytest.raises(InvariantError, match="not one of"):
        PageAllocator(3).free([page])


def test_random_traffic_against_a_set() -> None:
    draw = random.Random(0)
    allocator = PageAllocator(50)
    free, held = set(range(50)), set()
    for _ in range(5000):
        if draw.random() < 0.5:
            pages = allocator.take(draw.randrange(len(free) + 1))
            assert len(set(pages)) == len(pages)
            assert free.issuperset(pages)
            free -= set(pages)
            held |= set(pages)
        else:
            pages = draw.sample(sorted(held), draw.randrange(len(held) + 1))
            allocator.free(pages)
            free |= set(pages)
            held -= set(pages)
        assert set(allocator.free_pages) == free
        assert all(allocator.is_free(page) == (page in free) for page in range(50))
