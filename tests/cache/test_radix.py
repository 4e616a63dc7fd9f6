"""The prefix tree: matching, splitting, locking, eviction order, cost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from cairn.cache.radix import Mark, Node, PageKeys, RadixTree, page_keys
from cairn.errors import BadRequest, InvariantError

SIZE = 3


def tokens_of(text: str) -> list[int]:
    """One page per letter; pages of different letters differ only in their last token."""
    return [token for letter in text for token in (7, 7, ord(letter))]


def add(tree: RadixTree, text: str, first_page: int) -> Node:
    """Cache `text` in pages first_page, first_page + 1, ..., and keep it locked."""
    node, pages = tree.acquire(tokens_of(text), 1000)
    keys = page_keys(tokens_of(text), len(pages), len(text), SIZE)
    ids = list(range(first_page + len(pages), first_page + len(text)))
    node, held = tree.extend(node, keys, ids)
    assert held == ids
    return node


def put(tree: RadixTree, text: str, first_page: int) -> None:
    tree.release(add(tree, text, first_page))


def look(tree: RadixTree, text: str, max_pages: int = 1000) -> list[int]:
    """The pages found for `text`. Counts as a use."""
    node, pages = tree.acquire(tokens_of(text), max_pages)
    tree.release(node)
    return pages


def edges(tree: RadixTree) -> int:
    nodes = [tree.root]
    for node in nodes:
        nodes += node.children.values()
    return len(nodes) - 1


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        tuple,
        lambda ids: array("i", ids),
        lambda ids: array("q", ids),
        lambda ids: np.array(ids, dtype=np.int32),
        lambda ids: np.array(ids, dtype=np.int64),
        lambda ids: np.array(ids, dtype=np.uint16),
        lambda ids: np.array(ids, dtype=np.int32).repeat(2)[::2],
    ],
)
def test_keys_are_the_same_for_every_container(wrap: type) -> None:
    ids = [0, 1, 258, 65535, 5, 6, 9]
    expected = [array("i", ids[:3]).tobytes(), array("i", ids[3:6]).tobytes()]
    assert page_keys(wrap(ids), 0, 2, 3) == expected
    assert page_keys(wrap(ids), 1, 2, 3) == expected[1:]
    assert page_keys(wrap(ids), 1, 1, 3) == []


@pytest.mark.parametrize(
    "ids", [[2**31, 0, 0], [0, -(2**31) - 1, 0], np.array([0, 2**32, 0], dtype=np.int64)]
)
def test_ids_beyond_32_bits_are_refused(ids: Sequence[int]) -> None:
    with pytest.raises(BadRequest, match="32 bits"):
        page_keys(ids, 0, 1, 3)


def test_marks_are_part_of_the_keys_of_the_pages_that_they_touch() -> None:
    ids = list(range(12))
    plain = page_keys(ids, 0, 4, 3)
    marks = [Mark(4, 8, b"one"), Mark(8, 9, b"two")]
    marked = page_keys(ids, 0, 4, 3, marks)
    assert [a == b for a, b in zip(plain, marked, strict=True)] == [True, False, False, True]
    # For any range of pages, and any part of the sequence that has been converted.
    for first in range(4):
        for last in range(first, 5):
            assert page_keys(ids, first, last, 3, marks) == marked[first:last]
    assert [PageKeys(ids, 4, 3, marks)[i] for i in range(4)] == marked
    for others in ([Mark(4, 8, b"two")], [Mark(4, 7, b"one")], [Mark(3, 8, b"one")], marks[1:]):
        assert page_keys(ids, 1, 3, 3, others) != marked[1:3]


def test_keys_are_converted_only_as_far_as_they_are_read() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            run = super().__getitem__(index)
            Counting.read += len(run)
            return run

    keys = PageKeys(Counting(range(3000)), 1000, SIZE)
    assert len(keys) == 1000
    assert keys[0] == array("i", [0, 1, 2]).tobytes()
    assert Counting.read == SIZE
    assert keys[9] == array("i", [27, 28, 29]).tobytes()
    assert Counting.read <= 20 * SIZE
    assert [keys[i] for i in range(1000)] == page_keys(range(3000), 0, 1000, SIZE)
    assert Counting.read == 3000


def test_the_longest_prefix_is_found_and_edges_split_where_prefixes_part() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abcdef", 0)
    assert edges(tree) == 1
    assert look(tree, "abcdef") == [0, 1, 2, 3, 4, 5]
    assert look(tree, "abcx") == [0, 1, 2]
    assert look(tree, "abcdefgh") == [0, 1, 2, 3, 4, 5]
    assert look(tree, "x") == []
    assert look(tree, "") == []
    put(tree, "abcxyz", 10)
    assert look(tree, "abcxyz") == [0, 1, 2, 13, 14, 15]
    assert look(tree, "abcdef") == [0, 1, 2, 3, 4, 5]
    assert tree.num_cached == 9


def test_no_more_pages_than_asked_for() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abcdef", 0)
    for most in range(7):
        assert look(tree, "abcdef", most) == list(range(most))
    assert look(tree, "abcdef", -1) == []


def test_matching_changes_nothing() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abcdef", 0)
    for text, found in (("abcx", [0, 1, 2]), ("abcdefgh", [0, 1, 2, 3, 4, 5]), ("x", [])):
        assert tree.match(tokens_of(text), 1000) == found
    assert tree.match(tokens_of("abcdef"), 4) == [0, 1, 2, 3]
    assert edges(tree) == 1
    assert tree.num_evictable == 6


def test_an_incomplete_page_is_not_matched() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abc", 0)
    node, pages = tree.acquire(tokens_of("abc")[:-1], 1000)
    assert pages == [0, 1]
    tree.release(node)


def test_page_by_page_growth_keeps_one_edge() -> None:
    tree = RadixTree(SIZE)
    node, _ = tree.acquire((), 0)
    text = "abcdefghij"
    for page in range(10):
        node, _ = tree.extend(node, page_keys(tokens_of(text), page, page + 1, SIZE), [page])
        assert edges(tree) == 1
    assert node.pages == list(range(10))
    assert tree.num_evictable == 0
    tree.release(node)
    assert tree.num_evictable == 10


def test_two_leases_growing_alike_keep_few_edges() -> None:
    tree = RadixTree(SIZE)
    first, _ = tree.acquire((), 0)
    second, _ = tree.acquire((), 0)
    text = "abcdefghij"
    for page in range(10):
        keys = page_keys(tokens_of(text), page, page + 1, SIZE)
        first, held = tree.extend(first, keys, [page])
        assert held == [page]
        if page % 2:
            last_two = page_keys(tokens_of(text), page - 1, page + 1, SIZE)
            second, held = tree.extend(second, last_two, [page + 99, page + 100])
            assert held == [page - 1, page]
        assert edges(tree) <= 2
    assert first is second
    tree.release(first)
    assert tree.num_evictable == 0
    tree.release(second)
    assert tree.num_evictable == tree.num_cached == 10


def test_deeper_pages_go_below_an_equal_prefix() -> None:
    tree = RadixTree(SIZE)
    late, _ = tree.acquire(tokens_of("abcd"), 1000)
    put(tree, "ab", 0)
    late, held = tree.extend(late, page_keys(tokens_of("abcd"), 0, 4, SIZE), [50, 51, 52, 53])
    assert held == [0, 1, 52, 53]
    assert look(tree, "abcd") == [0, 1, 52, 53]
    tree.release(late)


def test_a_locked_prefix_survives_any_eviction() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abcdef", 0)
    put(tree, "abcxyz", 10)
    node, _ = tree.acquire(tokens_of("abcd"), 1000)
    assert tree.num_evictable == 5
    assert sorted(tree.evict(1000)) == [4, 5, 13, 14, 15]
    assert tree.evict(1) == []
    assert tree.num_cached == 4
    tree.release(node)
    assert look(tree, "abcdef") == [0, 1, 2, 3]
    assert tree.evict(1000) == [3, 2, 1, 0]
    assert tree.num_cached == tree.num_evictable == 0


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abc", 0)
    put(tree, "xyz", 10)
    look(tree, "ab")
    assert tree.evict(1) == [2]
    assert tree.evict(2) == [12, 11]
    assert tree.evict(2) == [10, 1]
    assert tree.evict(2) == [0]


def test_a_busy_prefix_is_not_dragged_along_by_an_old_continuation() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abcdef", 0)
    put(tree, "xy", 10)
    look(tree, "abc")
    assert tree.evict(5) == [5, 4, 3, 11, 10]
    assert look(tree, "abc") == [0, 1, 2]


def test_releasing_twice_is_refused() -> None:
    tree = RadixTree(SIZE)
    node = add(tree, "ab", 0)
    tree.release(node)
    with pytest.raises(InvariantError, match="released twice"):
        tree.release(node)


@pytest.mark.parametrize("page", range(4))
def test_a_bad_token_leaves_the_tree_as_it_was(page: int) -> None:
    tree = RadixTree(SIZE)
    put(tree, "abcdef", 0)
    tokens = tokens_of("abcxefgh")
    tokens[page * SIZE] = 2**40
    with pytest.raises(BadRequest):
        tree.acquire(tokens, 1000)
    assert edges(tree) == 1
    assert tree.num_evictable == 6


def test_the_heap_does_not_grow_with_use() -> None:
    tree = RadixTree(SIZE)
    put(tree, "abc", 0)
    for _ in range(5000):
        look(tree, "abc")
    assert len(tree._heap) <= 70


def test_a_step_costs_edges_not_pages() -> None:
    """Locking and growing a long prefix touches few objects, which are counted instead of timed."""
    tree = RadixTree(SIZE)
    pages = 20_000
    tokens = np.arange(pages * SIZE + SIZE * 50, dtype=np.int32)
    node, _ = tree.acquire((), 0)
    node, _ = tree.extend(node, page_keys(tokens, 0, pages, SIZE), list(range(pages)))
    keys_before = node.keys
    for page in range(pages, pages + 50):
        node, _ = tree.extend(node, page_keys(tokens, page, page + 1, SIZE), [page])
    assert node.keys is keys_before, "growing must append, not copy"
    assert edges(tree) == 1
