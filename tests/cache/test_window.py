"""Pages of window layers: release, retention for resuming, and a random walk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from cairn.cache.invariants import check, examine
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import Lease, PageCache
from cairn.cache.radix import Node
from cairn.cache.window import WindowPages
from cairn.errors import InvariantError

SLOTS = SlotMap(4, landmarks=True)
REACH = 2


def cache_of(pages: int, window_pages: int, prefix_caching: bool = True) -> PageCache:
    return PageCache(pages, SLOTS, prefix_caching, WindowPages(window_pages, REACH))


def advance(cache: PageCache, lease: Lease, tokens: list[int], step: int = 1) -> int:
    """Compute all complete pages of a lease; returns the maximum number of window pages it held."""
    most = 0
    for end in range(len(lease.pages) + step, len(tokens) // 3 + step, step):
        assert cache.grow(lease, min(end, len(tokens) // 3))
        most = max(most, len(lease.window))
        cache.commit(lease, tokens, 3 * len(lease.pages))
    return most


def serve(cache: PageCache, tokens: list[int]) -> int:
    """A request from beginning to end; returns the cached pages that it found."""
    lease = cache.open(tokens, (len(tokens) - 1) // 3)
    advance(cache, lease, tokens)
    cache.close(lease)
    return lease.cached_pages


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("step", [1, 5])
def test_a_sequence_holds_what_its_window_touches(step: int, prefix_caching: bool) -> None:
    cache = cache_of(100, REACH + 5, prefix_caching)
    tokens = list(range(300))
    lease = cache.open(tokens, 0)
    assert advance(cache, lease, tokens, step) == REACH + step
    assert (len(lease.pages), len(lease.window)) == (100, REACH)
    check(cache, [lease])
    cache.close(lease)
    assert cache.window is not None
    assert cache.window.available == REACH + 5
    assert (cache.window.num_kept > 0) == prefix_caching


def test_the_last_pages_are_resumed_from() -> None:
    cache = cache_of(100, 12)
    tokens = list(range(90))
    assert serve(cache, tokens) == 0
    other = [7] * 90
    assert serve(cache, other) == 0
    # The end of the first sequence is kept longer than the pages that the second one's window has
    # left.
    assert serve(cache, [*tokens, 1, 2, 3]) == 30
    check(cache, [])


def test_without_the_window_a_shorter_prefix_is_found() -> None:
    cache = cache_of(100, 8)
    tokens = list(range(90))
    serve(cache, tokens)
    lease = cache.open([*tokens[:60], 5, 5, 5], 20)
    assert (lease.cached_pages, lease.missed, lease.window) == (0, 20, [])
    advance(cache, lease, [*tokens[:60], 5, 5, 5])
    # The next request that branches here can resume at the branch.
    cache.close(lease)
    assert serve(cache, [*tokens[:60], 6, 6, 6]) == 20
    check(cache, [])


def test_pages_of_duplicates_come_to_the_cached_ones() -> None:
    """The tree has the tokens, but not the window: the request that recomputes it stores it
    there."""
    cache = cache_of(60, 20)
    tokens = list(range(30))
    serve(cache, tokens)
    window = cache.window
    assert window is not None
    window.release(window.take(window.available), wanted=False)
    lease = cache.open(tokens, 10)
    assert (lease.cached_pages, lease.missed) == (0, 10)
    advance(cache, lease, tokens)
    assert len(lease.duplicates) == 10
    assert cache.drop_duplicates(lease)
    assert cache.num_owned == 0
    check(cache, [lease])
    cache.close(lease)
    assert cache.num_owned == 0
    assert serve(cache, [*tokens, 1]) == 10
    check(cache, [])


def test_growing_needs_pages_of_both_pools() -> None:
    cache = cache_of(20, 6)
    lease = cache.open([1], 0)
    assert cache.available == 6
    assert not cache.grow(lease, 7)
    assert (lease.pages, lease.window) == ([], [])
    assert cache.grow(lease, 6)
    other = cache.open([2], 0)
    assert (cache.available, cache.spare) == (0, 14)
    assert not cache.grow(other, 1)
    cache.pass_windows(lease, 5)
    assert cache.grow(other, 3)
    check(cache, [lease, other])


def test_growth_counts_window_pages_that_are_freed() -> None:
    cache = cache_of(100, 12)
    lease, other = cache.open([1], 0), cache.open([2], 0)
    assert cache.fits(cache.growth(lease, 90), at_once=8)
    assert not cache.fits(cache.growth(lease, 90), at_once=9)
    assert not cache.fits(cache.growth(lease, 101), at_once=1)
    assert cache.fits(cache.growth(lease, 40) + cache.growth(other, 40), at_once=4)
    assert not cache.fits(cache.growth(lease, 40) + cache.growth(other, 40), at_once=5)
    assert cache.fits(cache.growth(lease, 3) + cache.growth(other, 3), at_once=99)


def leak(cache: PageCache, lease: Lease) -> None:
    assert cache.window is not None
    cache.window.allocator.take(1)


def lost(cache: PageCache, lease: Lease) -> None:
    lease.window.pop(0)


def swapped(cache: PageCache, lease: Lease) -> None:
    lease.window.reverse()


def freed(cache: PageCache, lease: Lease) -> None:
    assert cache.window is not None
    cache.window.allocator.free(lease.window[:1])


def stray(cache: PageCache, lease: Lease) -> None:
    assert cache.window is not None
    cache.window.beside[cache.allocator.free_pages[0]] = lease.window[-1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leak, "leaked window pages"),
        (lost, "lacks window pages"),
        (lost, "other users"),
        (swapped, "another window page"),
        (freed, "contested window pages"),
        (stray, "not cached"),
    ],
)
def test_damage_is_found(damage: Callable[[PageCache, Lease], None], words: str) -> None:
    cache = cache_of(30, 12)
    tokens = list(range(24))
    lease = cache.open(tokens, 0)
    advance(cache, lease, tokens)
    assert "12 window pages: 4 free, 6 kept, 2 held" in str(check(cache, [lease]))
    damage(cache, lease)
    assert words in str(examine(cache, [lease]))


def test_giving_back_twice_is_refused() -> None:
    window = WindowPages(4, REACH)
    pages = window.take(2)
    window.release(pages, wanted=False)
    with pytest.raises(InvariantError, match="given back twice"):
        window.release(pages, wanted=False)


Prefix = tuple[int, ...]


class Walk:
    """Random operations compared with a model that stores prefixes as tuples. It asks the tree
    which prefixes are cached; test_paged tests the tree."""

    def __init__(self, seed: int, prefix_caching: bool) -> None:
        self.draw = random.Random(seed)
        self.reach = self.draw.randrange(4)
        self.window = WindowPages(self.draw.choice((14, 20, 40)), self.reach)
        self.cache = PageCache(40, SLOTS, prefix_caching, self.window)
        self.open: list[tuple[Lease, Prefix]] = []
        self.recent: list[Prefix] = [()]
        self.beside: dict[Prefix, int] = {}
        self.users: Counter[int] = Counter()
        self.wanted: set[int] = set()
        self.kept: list[int] = []
        self.hits = self.short = 0

    def cached(self) -> dict[Prefix, int]:
        return dict(self._paths(self.cache.tree.root, ()))

    def _paths(self, node: Node, prefix: Prefix) -> Iterator[tuple[Prefix, int]]:
        for key, page in zip(node.keys, node.pages, strict=True):
            prefix = (*prefix, key[0])
            yield prefix, page
        for child in node.children.values():
            yield from self._paths(child, prefix)

    def order(self) -> list[int]:
        return sorted(self.kept, key=lambda page: page in self.wanted)

    def step(self) -> None:
        action = self.draw.random()
        if action < 0.25 or not self.open:
            if len(self.open) < 5:
                self.start()
        elif action < 0.6:
            self.grow(*self.draw.choice(self.open))
        elif action < 0.85:
            self.commit(*self.draw.choice(self.open))
        elif action < 0.995:
            self.close(self.draw.randrange(len(self.open)))
        else:
            self.cache.reset()
            self.forget()

    def start(self) -> None:
        known = self.draw.choice(self.recent)
        kept = known[: self.draw.randrange(len(known) + 1)]
        prefix = (*kept, *(self.draw.randrange(3) for _ in range(self.draw.randrange(14))))
        self.recent = [*self.recent[-5:], prefix]
        cached, found = self.cached(), 0
        while found < len(prefix) and prefix[: found + 1] in cached:
            found += 1
        resumed = next(
            end
            for end in range(found, -1, -1)
            if all(prefix[: n + 1] in self.beside for n in range(max(0, end - self.reach), end))
        )
        lease = self.cache.open([name for name in prefix for _ in range(3)], 99)
        assert (lease.cached_pages, lease.missed) == (resumed, found)
        under = [prefix[: n + 1] for n in range(max(0, resumed - self.reach), resumed)]
        assert lease.window == [self.beside[p] for p in under]
        for page in lease.window:
            self.users[page] += 1
            self.wanted.add(page)
            if page in self.kept:
                self.kept.remove(page)
        self.hits += resumed
        self.short += found - resumed
        self.open.append((lease, prefix))

    def grow(self, lease: Lease, prefix: Prefix) -> None:
        count = self.draw.choice((0, 1, 2, 5, 9))
        count = max(0, min(count, len(prefix) - len(lease.pages)))
        free = set(self.window.allocator.free_pages)
        pages = self.cache.num_free + self.cache.num_evictable
        granted = self.cache.grow(lease, len(lease.pages) + count)
        assert granted == (count == 0 or count <= min(pages, len(free) + len(self.kept)))
        if granted and count:
            free |= self.forget()
            while len(free) < count:
                page = self.order()[0]
                self.kept.remove(page)
                self.wanted.discard(page)
                self.beside = {p: w for p, w in self.beside.items() if w != page}
                free.add(page)
            assert set(lease.window[-count:]) <= free
            self.users.update(lease.window[-count:])

    def forget(self) -> set[int]:
        """Prefixes have been evicted from the tree, so their window pages are free."""
        cached = self.cached()
        gone = {w for p, w in self.beside.items() if p not in cached}
        self.beside = {p: w for p, w in self.beside.items() if p in cached}
        self.kept = [page for page in self.kept if page not in gone]
        self.wanted -= gone
        return gone

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        first = max(lease.committed, lease.window_first)
        if first > len(lease.pages):
            return
        last = self.draw.randint(first, len(lease.pages))
        begin, held = lease.window_first, list(lease.window)
        self.cache.commit(lease, [name for name in prefix for _ in range(3)], 3 * last)
        if self.cache.prefix_caching:
            for n in range(first, last):
                self.beside.setdefault(prefix[: n + 1], held[n - begin])
        passed = max(0, last - self.reach - begin)
        assert lease.window == held[passed:]
        for n, page in enumerate(held[:passed], start=begin):
            self.release(page, lease.missed - self.reach <= n < lease.missed)

    def release(self, page: int, wanted: bool) -> None:
        self.users[page] -= 1
        if wanted:
            self.wanted.add(page)
        if not self.users[page] and page in self.beside.values():
            self.kept.append(page)
        elif not self.users[page]:
            self.wanted.discard(page)

    def close(self, number: int) -> None:
        lease, _ = self.open.pop(number)
        held = list(lease.window)
        self.cache.close(lease)
        for page in held:
            self.release(page, wanted=True)

    def compare(self) -> None:
        check(self.cache, [lease for lease, _ in self.open])
        cached = self.cached()
        assert self.window.beside == {cached[p]: page for p, page in self.beside.items()}
        assert self.window.kept() == self.order()
        used = set(self.kept) | {page for page, count in self.users.items() if count}
        assert set(self.window.allocator.free_pages) == set(range(self.window.num_pages)) - used


@pytest.mark.parametrize("seed", range(8))
def test_random_walk_beside_a_plain_model(seed: int) -> None:
    walk = Walk(seed, prefix_caching=seed % 4 != 3)
    for _ in range(1200):
        walk.step()
        walk.compare()
    if walk.cache.prefix_caching:
        assert walk.hits > 100
        assert walk.window.num_pages > 20 or walk.reach == 0 or walk.short > 0
    while walk.open:
        walk.close(0)
    walk.cache.reset()
    walk.forget()
    walk.compare()
    assert walk.window.num_free == walk.window.num_pages
