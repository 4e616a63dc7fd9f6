"""The ledger of snapshots: no leaks, no snapshot with two owners, and sequences resume from the
state of their own prefix."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest

from cairn.cache.invariants import check, examine
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import Lease, PageCache
from cairn.cache.schema import CacheSchema
from cairn.cache.states import StateSnapshots
from cairn.engine.build import snapshot_interval

SLOTS = SlotMap(4, landmarks=False)


def cache_of(pages: int, snapshots: int, interval: int = 4, prefix_caching: bool = True):
    return PageCache(pages, SLOTS, prefix_caching, states=StateSnapshots(snapshots, interval))


def prefill(cache: PageCache, tokens: list[int]) -> Lease:
    """A request that computes its whole prompt, in chunks that end at snapshots."""
    lease = cache.open(tokens, (len(tokens) - 1) // 4)
    cache.resume(lease)
    assert cache.grow(lease, -(-len(tokens) // 4))
    for pages in cache.snapshot_borders(lease, len(tokens)):
        cache.take_snapshot(lease, pages, trailing=False)
        cache.commit(lease, tokens, 4 * pages)
    cache.commit(lease, tokens)
    return lease


def serve(cache: PageCache, tokens: list[int]) -> int:
    """A request from beginning to end; returns the cached pages that it found."""
    lease = prefill(cache, tokens)
    check(cache, [lease])
    cache.close(lease)
    check(cache, [])
    return lease.cached_pages


def test_a_prefix_is_found_up_to_a_snapshot() -> None:
    cache = cache_of(100, 10)
    tokens = list(range(50))
    assert serve(cache, tokens) == 0
    assert cache.states is not None
    # The last page border of the prompt, and every fourth page.
    assert sorted(cache.states.beside) == sorted(
        cache.tree.match(tokens, 12)[i - 1] for i in (4, 8, 12)
    )
    assert serve(cache, [*tokens[:48], 1, 2]) == 12
    assert serve(cache, [*tokens[:40], 1, 2]) == 8
    # The branch without a snapshot left one for the next branch.
    assert serve(cache, [*tokens[:40], 3, 4]) == 10


def test_a_snapshot_lies_beside_its_page_however_many_are_committed_at_once() -> None:
    cache, tokens = cache_of(100, 10), list(range(50))
    lease = cache.open(tokens, 12)
    assert cache.grow(lease, 13)
    cache.take_snapshot(lease, 5, trailing=False)
    cache.commit(lease, tokens)
    assert cache.states is not None
    assert list(cache.states.beside) == [cache.tree.match(tokens, 12)[4]]
    cache.close(lease)
    check(cache, [])


def test_those_passed_by_are_given_up_first() -> None:
    cache = cache_of(100, 3)
    serve(cache, list(range(50)))
    serve(cache, [7] * 17)
    serve(cache, [8] * 13)
    assert cache.states is not None and cache.states.evicted == 2
    assert serve(cache, [*range(48), 5]) == 12


def test_a_snapshot_goes_with_its_page() -> None:
    cache = cache_of(12, 10)
    serve(cache, list(range(48)))
    assert cache.states is not None and cache.states.num_kept
    serve(cache, [7] * 48)
    assert set(cache.states.beside) <= set(cache.tree.match([7] * 48, 12))
    cache.reset()
    assert (cache.states.num_kept, cache.states.num_free) == (0, 10)


def test_one_that_is_being_resumed_from_stays() -> None:
    cache = cache_of(100, 1)
    tokens = list(range(41))
    serve(cache, tokens)
    assert cache.states is not None
    lease = cache.open(tokens, 10)
    assert lease.resumes is not None and lease.cached_pages == 10
    other = cache.open([9] * 9, 2)
    assert cache.grow(other, 3)
    assert cache.take_snapshot(other, 2, trailing=False) is None
    check(cache, [lease, other])
    assert cache.resume(lease) is not None
    assert cache.resume(lease) is None
    assert cache.take_snapshot(other, 2, trailing=False) is not None
    check(cache, [lease, other])
    for some in (lease, other):
        cache.close(some)
    assert (cache.states.num_free, cache.states.num_kept) == (1, 0)


def test_without_prefix_caching_none_is_taken() -> None:
    cache = cache_of(100, 3, prefix_caching=False)
    lease = prefill(cache, list(range(30)))
    assert cache.snapshot_borders(lease, 30) == []
    assert cache.take_snapshot(lease, 2, trailing=True) is None


def test_a_decoding_sequence_keeps_one() -> None:
    cache = cache_of(100, 8)
    tokens = list(range(9))
    lease = prefill(cache, tokens)
    assert cache.states is not None
    for pages in range(3, 11):
        tokens += [pages] * 4
        assert cache.grow(lease, pages)
        cache.take_snapshot(lease, pages, trailing=True)
        cache.commit(lease, tokens, 4 * pages)
    check(cache, [lease])
    others = [cache.states.take() for _ in range(7)]
    # The snapshots of the prompt and the newest one are evicted last.
    path = cache.tree.match(tokens, 10)
    assert path[9] in cache.states.beside
    cache.states.free(n for n in others if n is not None)


def leak(states: StateSnapshots, lease: Lease) -> None:
    states.take()


def twice(states: StateSnapshots, lease: Lease) -> None:
    lease.snapshots[3] = next(iter(states.beside.values()))


def beside_nothing(states: StateSnapshots, lease: Lease) -> None:
    states.beside[99] = states.beside.pop(next(iter(states.beside)))


def given_up(states: StateSnapshots, lease: Lease) -> None:
    lease.resumes = next(iter(states.beside)), 77


@pytest.mark.parametrize("damage", [leak, twice, beside_nothing, given_up])
def test_the_check_finds_damage(damage) -> None:
    cache = cache_of(100, 8)
    lease = prefill(cache, list(range(50)))
    assert not examine(cache, [lease]).problems
    assert cache.states is not None
    damage(cache.states, lease)
    assert examine(cache, [lease]).problems


class Walk:
    """Requests that come, compute, fail and end at random, and what is in the snapshots.

    Args:
        seed: of everything.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.cache = cache_of(rng.choice((30, 60)), rng.choice((1, 3, 9)), rng.choice((2, 4)))
        self.held: dict[int, tuple[int, ...]] = {}
        self.running: list[tuple[Lease, list[int], int]] = []

    def act(self) -> None:
        """Run one random operation."""
        action, running = self.rng.random(), self.running
        if action < 0.3 and len(running) < 4:
            self._open()
        elif action < 0.8 and running:
            self._advance(running.pop(self.rng.randrange(len(running))))
        elif action < 0.97 and running:
            self.cache.close(running.pop(self.rng.randrange(len(running)))[0])
        elif action > 0.99:
            self.cache.reset()
        check(self.cache, [lease for lease, _, _ in running])

    def _open(self) -> None:
        pages = self.rng.randrange(1, 12)
        tokens = [i for _ in range(pages) for i in [self.rng.randrange(2)] * 4]
        lease = self.cache.open(tokens, pages - 1)
        self.running.append((lease, tokens, 4 * lease.cached_pages))

    def _advance(self, request: tuple[Lease, list[int], int]) -> None:
        lease, tokens, done = request
        cache, rng = self.cache, self.rng
        snapshot = cache.resume(lease)
        if snapshot is not None:
            # Whatever ran in between, the state is the one that this prefix left.
            assert self.held[snapshot] == tuple(tokens[:done])
        decoding = done == len(tokens)
        if decoding:
            tokens.append(rng.randrange(2))
        borders = [4 * n for n in cache.snapshot_borders(lease, len(tokens))]
        end = min([b for b in borders if b > done] + [rng.randrange(done, len(tokens)) + 1])
        if not cache.grow(lease, -(-end // 4)):
            cache.close(lease)
            return
        if end % 4 == 0 and (decoding or end in borders):
            taken = cache.take_snapshot(lease, end // 4, trailing=decoding)
            if taken is not None:
                self.held[taken] = tuple(tokens[:end])
        if rng.random() < 0.1:
            # The step failed.
            cache.close(lease)
            return
        cache.commit(lease, tokens, end)
        self.running.append((lease, tokens, end))


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(seed: int) -> None:
    """A sequence resumes from the state of its own prefix, in random schedules."""
    walk = Walk(seed)
    for _ in range(600):
        walk.act()
    assert walk.cache.prefix_hits
    for lease, _, _ in walk.running:
        walk.cache.close(lease)
    check(walk.cache, [])


@pytest.mark.parametrize(("step_pages", "interval"), [(0, 8), (17, 8), (32, 16), (264, 128)])
def test_pages_between_snapshots_weigh_a_state_and_fill_half_of_a_step(step_pages, interval):
    schema = SimpleNamespace(groups=(SimpleNamespace(page_bytes=100),), row_bytes=640)
    assert snapshot_interval(cast(CacheSchema, schema), step_pages) == interval
