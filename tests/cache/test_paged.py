"""The page cache: leases, and a random walk compared with a simple model of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import numpy as np
import pytest

from cairn.cache.invariants import check
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import Lease, PageCache
from cairn.cache.radix import Node, Tokens
from cairn.errors import InvariantError

SLOTS = SlotMap(4, landmarks=True)
PROMPT = list(range(100, 112))


def cached(cache: PageCache, tokens: list[int]) -> list[int]:
    """Cache the complete pages of `tokens` and release the lease."""
    lease = cache.open(tokens, 1000)
    assert cache.grow(lease, cache.slots.pages_for(len(tokens)))
    cache.commit(lease, tokens)
    pages = lease.pages[: lease.committed]
    cache.close(lease)
    return pages


def test_a_second_request_finds_the_first_ones_pages() -> None:
    cache = PageCache(10, SLOTS)
    pages = cached(cache, PROMPT)
    assert len(pages) == 4
    lease = cache.open([*PROMPT[:7], 0, 0, 0], 1000)
    assert lease.pages == pages[:2]
    assert lease.cached_pages == lease.committed == 2
    assert (cache.num_free, cache.num_cached, cache.num_evictable, cache.num_owned) == (6, 4, 2, 0)
    assert cache.available == 8
    assert (cache.prefix_queries, cache.prefix_hits) == (12 + 10, 6)
    cache.close(lease)
    assert check(cache, []).evictable == 4


def test_a_repeated_prompt_leaves_a_token_to_compute() -> None:
    cache = PageCache(10, SLOTS)
    cached(cache, PROMPT)
    most = cache.slots.complete_pages(len(PROMPT) - 1)
    lease = cache.open(PROMPT, most)
    assert lease.cached_pages == most == 3
    cache.close(lease)


def test_growing_is_all_or_nothing() -> None:
    cache = PageCache(6, SLOTS)
    cached(cache, PROMPT)
    keep = cache.open(PROMPT, 2)
    lease = cache.open([1, 2, 3], 9)
    assert not cache.grow(lease, 5)
    assert lease.pages == []
    assert cache.num_cached == 4
    assert cache.evicted_pages == 0
    assert cache.grow(lease, 4)
    assert not set(lease.pages) & set(keep.pages)
    assert (cache.num_cached, cache.evicted_pages, cache.available) == (2, 2, 0)
    assert cache.grow(lease, 1), "never shrinks, nothing to do"
    assert len(lease.pages) == 4
    check(cache, [keep, lease])


def test_the_whole_pool_is_usable_by_one_lease() -> None:
    cache = PageCache(6, SLOTS)
    cached(cache, PROMPT)
    lease = cache.open([5] * 18, 9)
    assert cache.grow(lease, 6)
    assert sorted(lease.pages) == list(range(6))


def test_duplicates_are_given_up_for_the_pages_of_the_tree() -> None:
    cache = PageCache(12, SLOTS)
    first, second = cache.open(PROMPT, 9), cache.open(PROMPT, 9)
    for lease in (first, second):
        assert cache.grow(lease, 5)
        cache.commit(lease, PROMPT)
    assert not cache.drop_duplicates(first)
    assert not cache.grow(second, 8)
    own = second.pages[4:]
    assert cache.drop_duplicates(second) and not second.duplicates
    assert second.pages == first.pages[:4] + own
    check(cache, [first, second])
    assert cache.grow(second, 8)
    for lease in (first, second):
        cache.close(lease)
    assert check(cache, []).free == 8


def test_an_equal_page_stays_private_until_close() -> None:
    cache = PageCache(12, SLOTS)
    first, second = cache.open(PROMPT, 9), cache.open(PROMPT, 9)
    for lease in (first, second):
        assert cache.grow(lease, 4)
    before = list(second.pages)
    cache.commit(first, PROMPT, 6)
    cache.commit(second, PROMPT)
    assert second.pages == before
    assert second.duplicates == before[:2]
    assert (cache.num_cached, cache.num_owned) == (4, 4)
    check(cache, [first, second])
    third = cache.open(PROMPT, 9)
    assert third.pages == first.pages[:2] + before[2:]
    cache.commit(first, PROMPT)
    assert first.duplicates == first.pages[2:]
    for lease in (second, third, first):
        cache.close(lease)
    assert check(cache, []).free == 8


def test_a_lease_in_its_own_way_gets_on_after_reopening() -> None:
    cache = PageCache(6, SLOTS)
    first, second = cache.open(PROMPT, 9), cache.open(PROMPT, 9)
    for lease in (first, second):
        assert cache.grow(lease, 3)
        cache.commit(lease, PROMPT, 9)
    cache.close(first)
    assert not cache.grow(second, 4)
    cache.close(second)
    second = cache.open(PROMPT, 9)
    assert second.cached_pages == 3
    assert cache.grow(second, 6)


def test_commit_reads_only_what_is_new() -> None:
    cache = PageCache(10, SLOTS)
    tokens = array("i", PROMPT)
    lease = cache.open(tokens, 9)
    assert cache.grow(lease, 4)
    for length in range(len(PROMPT) + 1):
        cache.commit(lease, tokens, length)
        assert lease.committed == length // 3
    tokens[0] = -5
    cache.commit(lease, tokens)
    cache.close(lease)
    lease = cache.open(PROMPT, 9)
    assert lease.cached_pages == 4


def test_a_partly_filled_page_is_freed_not_cached() -> None:
    cache = PageCache(10, SLOTS)
    lease = cache.open(PROMPT, 9)
    assert cache.grow(lease, 4)
    cache.commit(lease, PROMPT, 8)
    assert (cache.num_cached, cache.num_owned) == (2, 2)
    cache.close(lease)
    assert (cache.num_cached, cache.num_free) == (2, 8)


def test_misuse_is_refused() -> None:
    cache = PageCache(10, SLOTS)
    lease = cache.open(PROMPT, 9)
    assert cache.grow(lease, 2)
    with pytest.raises(InvariantError, match="commit of 4 pages"):
        cache.commit(lease, PROMPT)
    cache.commit(lease, PROMPT, 6)
    with pytest.raises(InvariantError, match="commit of 1 pages"):
        cache.commit(lease, PROMPT, 3)
    cache.close(lease)
    assert lease.pages == []
    with pytest.raises(InvariantError, match="closed lease"):
        cache.close(lease)
    with pytest.raises(InvariantError, match="closed lease"):
        cache.grow(lease, 1)
    with pytest.raises(InvariantError, match="closed lease"):
        cache.commit(lease, PROMPT)
    check(cache, [])


def test_reset_drops_what_is_not_in_use() -> None:
    cache = PageCache(20, SLOTS)
    cached(cache, PROMPT)
    cached(cache, [1] * 9)
    lease = cache.open(PROMPT, 2)
    assert cache.reset() == 2 + 3
    assert (cache.num_cached, cache.num_evictable, cache.evicted_pages) == (2, 0, 0)
    cache.close(lease)
    assert cache.reset() == 2
    assert check(cache, []).free == 20


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = PageCache(10, SLOTS, prefix_caching=False)
    for _ in range(3):
        lease = cache.open(PROMPT, 9)
        assert (lease.pages, lease.cached_pages) == ([], 0)
        assert cache.grow(lease, 4)
        cache.commit(lease, PROMPT)
        assert (cache.num_cached, cache.num_owned) == (0, 4)
        check(cache, [lease])
        cache.close(lease)
        assert cache.num_free == 10
    assert (cache.prefix_queries, cache.prefix_hits) == (0, 0)


def test_a_thousand_short_requests_leak_nothing() -> None:
    cache = PageCache(16, SLOTS)
    draw = random.Random(1)
    for _ in range(1000):
        cached(cache, [draw.randrange(3) for _ in range(draw.randrange(20))])
    report = check(cache, [])
    assert report.free + report.evictable == 16


# A random walk of the cache, compared with a model that stores prefixes as tuples of page patterns,
# without tree, edges and heap. There are few patterns, so prefixes collide.

POOL = 40
STEPS = 5_000
Prefix = tuple[int, ...]


class Sequence:
    """An open lease and the model's knowledge of it."""

    def __init__(self, lease: Lease, prefix: Prefix, tokens: Tokens) -> None:
        self.lease = lease
        self.prefix = prefix
        self.tokens = tokens
        self.committed = lease.cached_pages
        self.pages = list(lease.pages)
        self.private: set[int] = set()


class Walk:
    """The cache under test, its model, and random operations that compare them."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.slots = SlotMap(page_size, landmarks=seed % 4 != 3)
        self.cache = PageCache(POOL, self.slots)
        self.size = self.slots.tokens_per_page
        base = [self.draw.randrange(4) for _ in range(self.size)]
        self.patterns = [
            base,
            [base[0] + 4, *base[1:]],
            [*base[:-1], base[-1] + 4],
        ]
        self.names = {array("i", p).tobytes(): n for n, p in enumerate(self.patterns)}
        self.open: list[Sequence] = []
        self.recent: list[Prefix] = [()]
        self.free = set(range(POOL))
        self.cached: dict[Prefix, int] = {}
        self.released: dict[Prefix, int] = {}
        self.content: dict[int, Prefix] = {}
        self.clock = 0
        self.evicted = 0

    def step(self) -> None:
        action = self.draw.random()
        if action < 0.001:
            self.reset()
        elif action < 0.2 or not self.open:
            if len(self.open) < 7:
                self.start()
        elif action < 0.5:
            self.grow(self.draw.choice(self.open))
        elif action < 0.84:
            self.commit(self.draw.choice(self.open))
        else:
            self.close(self.draw.choice(self.open))

    def start(self) -> None:
        known = self.draw.choice(self.recent)
        kept = known[: self.draw.randrange(len(known) + 1)]
        fresh = [self.draw.randrange(3) for _ in range(self.draw.randrange(12 - len(kept)))]
        prefix = (*kept, *fresh)
        self.recent = [*self.recent[-7:], prefix]
        ids = [token for name in prefix for token in self.patterns[name]]
        ids += self.patterns[self.draw.randrange(3)][: self.draw.randrange(self.size)]
        tokens: Tokens = ids
        kind = self.draw.randrange(3)
        if kind == 1:
            tokens = array("i", ids)
        elif kind == 2:
            tokens = np.array(ids, dtype=np.int64)
        length = self.draw.choice((len(tokens), self.draw.randrange(len(tokens) + 1)))
        most = self.draw.choice((99, self.slots.complete_pages(max(0, length - 1)), 0, 3))

        lease = self.cache.open(tokens[:length], most)
        found = 0
        while found < min(length // self.size, most) and prefix[: found + 1] in self.cached:
            found += 1
        assert lease.pages == [self.cached[prefix[: n + 1]] for n in range(found)]
        assert lease.cached_pages == found
        for depth, page in enumerate(lease.pages):
            assert self.content[page] == prefix[: depth + 1], "a page of another prefix"
        self.open.append(Sequence(lease, prefix, tokens))

    def grow(self, sequence: Sequence) -> None:
        total = len(sequence.pages) + self.draw.choice((0, 1, 2, 5, len(sequence.prefix) + 1))
        missing = total - len(sequence.pages)
        evictable = len(self.cached.keys() - self.locked())
        assert self.cache.num_evictable == evictable
        assert self.cache.available == evictable + len(self.free)
        granted = self.cache.grow(sequence.lease, total)
        assert granted == (missing <= len(self.free) + evictable)
        if not granted:
            assert sequence.lease.pages == sequence.pages
            return
        self.evict(missing - len(self.free))
        taken = sequence.lease.pages[len(sequence.pages) :]
        assert sequence.lease.pages[: len(sequence.pages)] == sequence.pages
        assert len(set(taken)) == len(taken) == missing
        assert self.free.issuperset(taken)
        self.free.difference_update(taken)
        sequence.pages += taken
        sequence.private.update(taken)

    def commit(self, sequence: Sequence) -> None:
        lowest = sequence.committed * self.size
        room = self.slots.tokens_in(len(sequence.pages) * self.slots.page_size)
        highest = max(lowest, min(len(sequence.tokens), room))
        length = self.draw.choice((highest, self.draw.randint(lowest, highest)))
        if self.draw.random() < 0.5:
            self.cache.commit(sequence.lease, sequence.tokens, length)
        else:
            self.cache.commit(sequence.lease, sequence.tokens[:length])
        for depth in range(sequence.committed, length // self.size):
            prefix, page = sequence.prefix[: depth + 1], sequence.pages[depth]
            if prefix not in self.cached:
                self.cached[prefix] = page
                self.released[prefix] = -1
                self.content[page] = prefix
                sequence.private.remove(page)
        sequence.committed = length // self.size
        assert sequence.lease.pages == sequence.pages

    def close(self, sequence: Sequence) -> None:
        self.cache.close(sequence.lease)
        self.open.remove(sequence)
        self.free |= sequence.private
        self.clock += 1
        for depth in range(sequence.committed):
            self.released[sequence.prefix[: depth + 1]] = self.clock

    def reset(self) -> None:
        count = len(self.cached.keys() - self.locked())
        assert self.cache.reset() == count
        self.evict(count)
        self.evicted -= count

    def locked(self) -> set[Prefix]:
        return {s.prefix[: depth + 1] for s in self.open for depth in range(s.committed)}

    def evict(self, count: int) -> None:
        """Drop the least recently released prefixes that have no children and no lease."""
        locked = self.locked() if count > 0 else set()
        for _ in range(count):
            continued = {prefix[:-1] for prefix in self.cached}
            victim = min(
                (p for p in self.cached if p not in locked and p not in continued),
                key=self.released.__getitem__,
            )
            page = self.cached.pop(victim)
            del self.released[victim], self.content[page]
            self.free.add(page)
            self.evicted += 1

    def compare(self) -> None:
        check(self.cache, [s.lease for s in self.open])
        assert set(self.cache.allocator.free_pages) == self.free
        assert dict(self.contents()) == self.cached
        assert self.cache.evicted_pages == self.evicted

    def contents(self) -> Iterator[tuple[Prefix, int]]:
        stack: list[tuple[Prefix, Node]] = [((), self.cache.tree.root)]
        while stack:
            prefix, node = stack.pop()
            for key, page in zip(node.keys, node.pages, strict=True):
                prefix = (*prefix, self.names[key])
                yield prefix, page
            stack += ((prefix, child) for child in node.children.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", [4, 64])
def test_random_walk_beside_a_plain_model(page_size: int, seed: int) -> None:
    walk = Walk(page_size, seed)
    for number in range(STEPS):
        walk.step()
        if number % 10 == 0:
            walk.compare()
    walk.compare()
    assert walk.cache.evicted_pages > 500, "the walk must run out of pages often"
    assert walk.cache.prefix_hits > 0.1 * walk.cache.prefix_queries
    for sequence in list(walk.open):
        walk.close(sequence)
    walk.compare()
    assert walk.cache.available == POOL
    walk.reset()
    walk.compare()
    assert walk.cache.num_free == POOL
