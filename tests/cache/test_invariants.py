"""The ledger check detects each kind of corruption and names the pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cairn.cache.invariants import check, examine
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import Lease, PageCache
from cairn.errors import InvariantError


def busy() -> tuple[PageCache, list[Lease]]:
    """Twenty pages: a cached prefix of three pages shared by two leases, a duplicate, and private
    pages."""
    cache = PageCache(20, SlotMap(4, landmarks=True))
    tokens = list(range(30))
    first, twin = cache.open(tokens, 9), cache.open(tokens, 9)
    for lease, pages in ((first, 5), (twin, 2)):
        assert cache.grow(lease, pages)
        cache.commit(lease, tokens, 3 * (3 if lease is first else 1))
    old = cache.open([99] * 9, 9)
    assert cache.grow(old, 3)
    cache.commit(old, [99] * 9)
    cache.close(old)
    return cache, [first, twin]


def test_counts() -> None:
    cache, leases = busy()
    report = check(cache, leases)
    assert (report.free, report.cached, report.owned) == (10, 6, 4)
    assert (report.evictable, report.leases) == (3, 2)
    assert (report.leaked, report.contested, report.problems) == ((), (), ())
    assert "20 pages: 10 free, 6 cached (3 evictable" in str(report)


def leak(cache: PageCache, leases: list[Lease]) -> None:
    cache.allocator.take(2)


def forgotten_lease(cache: PageCache, leases: list[Lease]) -> None:
    leases.pop()


def shared_page(cache: PageCache, leases: list[Lease]) -> None:
    leases[0].pages[-1] = leases[1].pages[-1]


def freed_while_cached(cache: PageCache, leases: list[Lease]) -> None:
    cache.allocator.free(cache.tree.root.children[next(iter(cache.tree.root.children))].pages[:1])


def unknown_page(cache: PageCache, leases: list[Lease]) -> None:
    leases[0].pages[-1] = 77


def wrong_lock(cache: PageCache, leases: list[Lease]) -> None:
    leases[0].node.locked += 1


def wrong_lease_count(cache: PageCache, leases: list[Lease]) -> None:
    cache.tree.root.leases += 1


def wrong_counter(cache: PageCache, leases: list[Lease]) -> None:
    cache.tree.num_evictable -= 1


def lost_leaf(cache: PageCache, leases: list[Lease]) -> None:
    cache.tree._heap.clear()


def missing_key(cache: PageCache, leases: list[Lease]) -> None:
    leases[0].node.keys.pop()


def wrong_child_key(cache: PageCache, leases: list[Lease]) -> None:
    leases[0].node.keys[0] = b"0" * 12


def swapped_page(cache: PageCache, leases: list[Lease]) -> None:
    leases[0].pages[0], leases[0].pages[1] = leases[0].pages[1], leases[0].pages[0]


def wrong_depth(cache: PageCache, leases: list[Lease]) -> None:
    leases[0].committed -= 1


def stray_node(cache: PageCache, leases: list[Lease]) -> None:
    other = PageCache(4, cache.slots)
    leases[0].node = other.tree.root


def closed_lease(cache: PageCache, leases: list[Lease]) -> None:
    cache.close(leases[0])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leak, "leaked pages"),
        (forgotten_lease, "leaked pages"),
        (shared_page, "contested pages"),
        (freed_while_cached, "contested pages"),
        (unknown_page, "unknown pages [77]"),
        (wrong_lock, "wrong lock count"),
        (wrong_lease_count, "counts 1 leases, 0 end there"),
        (wrong_counter, "the counter says"),
        (lost_leaf, "queued for eviction"),
        (missing_key, "pages for"),
        (wrong_child_key, "wrong parent or key"),
        (swapped_page, "differ from the tree's"),
        (wrong_depth, "pages deep"),
        (stray_node, "not in the tree"),
        (closed_lease, "closed lease"),
    ],
)
def test_damage_is_found(damage: Callable[[PageCache, list[Lease]], None], words: str) -> None:
    cache, leases = busy()
    damage(cache, leases)
    with pytest.raises(InvariantError) as caught:
        check(cache, leases)
    assert words in str(caught.value)
    assert str(examine(cache, leases)) == str(caught.value)


def test_dates_are_checked() -> None:
    cache, leases = busy()
    for lease in leases:
        cache.close(lease)
    cache.close(cache.open(list(range(6)), 1))
    check(cache, [])
    (head,) = [node for node in cache.tree.root.children.values() if node.children]
    (tail,) = head.children.values()
    tail.last_use = head.last_use + 1
    with pytest.raises(InvariantError, match="used less recently"):
        check(cache, [])
    tail.last_use = head.last_use
    with pytest.raises(InvariantError, match="should be merged"):
        check(cache, [])
