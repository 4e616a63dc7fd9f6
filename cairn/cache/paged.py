"""The life of a page: free, owned by a lease, cached in the prefix tree, evicted, free again.

What is evicted may stay in host memory (`cairn.cache.host`) and come back from there.

Where some layers see a window alone (`cairn.cache.window`), a lease holds pages of theirs beside
the last ones of its pages. Where some are recurrent (`cairn.cache.states`), snapshots of their
states are kept at page borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cairn.cache.allocator import PageAllocator
from cairn.cache.host import PAGE, STATE, WINDOW, HostCache
from cairn.cache.landmarks import SlotMap
from cairn.cache.loading import load_prefix
from cairn.cache.radix import Mark, Node, RadixTree, Tokens, page_keys
from cairn.cache.states import StateSnapshots
from cairn.cache.window import WindowPages
from cairn.errors import InvariantError


class Lease:
    """What one sequence holds of the page cache. Only `PageCache` changes it.

    Attributes:
        pages: physical page of each logical page. Entries never change while the lease is open,
            only new ones are appended; empty once closed.
        cached_pages: leading pages that were found in the cache when the lease was opened.
        committed: leading pages whose tokens are in the prefix tree.
        duplicates: committed pages that the lease still owns, because the tree had an equal page
            already.
        node: where the committed prefix ends in the tree; locked while the lease is open.
        marks: of tokens whose ids do not say what they stand for.
        window: pages of the window layers for the last logical pages; empty without such a pool.
        missed: pages of the cached prefix that would have been found, had the window before its end
            or a snapshot behind it been there.
        resumes: page of the tree, and the snapshot beside it that the sequence has yet to copy.
        snapshots: number of leading pages -> snapshot that a step in flight writes behind them.
        trailing: numbers of pages of those that the next one of the lease replaces.
        trail: page of the tree with the last of these.
        closed: the lease has been given back.
    """

    __slots__ = (
        "cached_pages",
        "closed",
        "committed",
        "duplicates",
        "marks",
        "missed",
        "node",
        "pages",
        "resumes",
        "snapshots",
        "trail",
        "trailing",
        "window",
    )

    def __init__(self, node: Node, pages: list[int], marks: Sequence[Mark] = ()) -> None:
        self.pages = pages
        self.marks = marks
        self.cached_pages = len(pages)
        self.committed = len(pages)
        self.duplicates: list[int] = []
        self.node = node
        self.window: list[int] = []
        self.missed = 0
        self.resumes: tuple[int, int] | None = None
        self.snapshots: dict[int, int] = {}
        self.trailing: set[int] = set()
        self.trail: int | None = None
        self.closed = False

    @property
    def owned(self) -> list[int]:
        """Pages that belong to this lease alone."""
        return self.duplicates + self.pages[self.committed :]

    @property
    def window_first(self) -> int:
        """The first logical page that still has a page of the window layers."""
        return len(self.pages) - len(self.window)


@dataclass(frozen=True, slots=True)
class Growth:
    """What it takes that leases grow.

    Attributes:
        pages: that they take.
        stay: of the window layers' pages for these, those that do not come back on the way.
    """

    pages: int = 0
    stay: int = 0

    def __add__(self, other: Self) -> Self:
        """That of both."""
        return type(self)(self.pages + other.pages, self.stay + other.stay)


NO_GROWTH = Growth()


class PageCache:
    """All pages of a pool: the free, those of cached prefixes, those of running sequences.

    Several leases may share the pages of a common prefix. A cached page is dropped only when pages
    are needed and no open lease uses it or anything that continues it; the least recently released
    goes first.

    Args:
        num_pages: pages in the pool.
        slots: how tokens fill pages.
        prefix_caching: False: nothing is kept or found, a page lives as long as its lease.
        window: the pages of window layers, if those have a pool of their own.
        states: the snapshots of recurrent layers, if there are any.
        host: keeps what is evicted; None: it is lost.

    Attributes:
        prefix_queries, prefix_hits: user tokens looked up by `open`, and those of them found.
        evicted_pages: cached pages dropped to make room.
    """

    def __init__(
        self,
        num_pages: int,
        slots: SlotMap,
        prefix_caching: bool = True,
        window: WindowPages | None = None,
        states: StateSnapshots | None = None,
        host: HostCache | None = None,
    ) -> None:
        self.slots = slots
        self.window = window
        self.states = states
        self.host = host
        if host is not None and window is not None:
            window.giving_up = lambda page, own: host.store(WINDOW, [(page, own)])
        if host is not None and states is not None:
            states.giving_up = lambda page, own: host.store(STATE, [(page, own)])
        self.prefix_caching = prefix_caching
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(slots.tokens_per_page)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.evicted_pages = 0

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self.allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages in the prefix tree, in use or not."""
        return self.tree.num_cached

    @property
    def num_evictable(self) -> int:
        """Pages in the prefix tree that no open lease needs."""
        return self.tree.num_evictable

    @property
    def num_owned(self) -> int:
        """Pages that belong to one open lease alone."""
        return self.num_pages - self.num_free - self.num_cached

    @property
    def available(self) -> int:
        """Pages that `grow` could hand out now: free or evictable, in every pool."""
        pages = self.allocator.num_free + self.tree.num_evictable
        return pages if self.window is None else min(pages, self.window.available)

    @property
    def spare(self) -> int:
        """Pages of all pools that are free or evictable: it grows when any comes back."""
        pages = self.num_free + self.num_evictable
        return pages if self.window is None else pages + self.window.available

    def open(self, tokens: Tokens, max_pages: int, marks: Sequence[Mark] = ()) -> Lease:
        """Start a lease on the longest cached prefix of complete pages of `tokens`, and lock it.

        With window layers it is the longest one that has everything under the window at its end,
        with recurrent layers the longest one that has a snapshot there.

        Args:
            tokens: user token ids of the sequence.
            max_pages: take at most this many cached pages, so that some token is left to compute.
            marks: of tokens whose ids do not say what they stand for; part of the pages' keys.

        Raises BadRequest for a token id that does not fit 32 bits.
        """
        if not self.prefix_caching:
            return Lease(*self.tree.acquire((), 0), marks)
        found: list[int] = []
        if self.window is not None or self.states is not None:
            found = self.tree.match(tokens, max_pages, marks)
            max_pages = self.resumable(found)
        node, pages = self.tree.acquire(tokens, max_pages, marks)
        self.prefix_queries += len(tokens)
        self.prefix_hits += len(pages) * self.slots.tokens_per_page
        lease = Lease(node, pages, marks)
        lease.missed = len(found)
        if self.states is not None and pages:
            lease.resumes = pages[-1], self.states.hold(pages[-1])
        if self.window is not None:
            lease.window = self.window.hold(pages[max(0, len(pages) - self.window.reach) :])
        return lease

    def snapshot_borders(self, lease: Lease, known: int) -> list[int]:
        """Numbers of leading pages behind which a prefill should leave a snapshot, ascending: see
        `cairn.cache.states`. A chunk of it ends at each of them.

        Args:
            known: tokens that it computes, and one more that follows.
        """
        if self.states is None or not self.prefix_caching or not self.states.count:
            return []
        last, step = self.slots.complete_pages(known - 1), self.states.interval
        begin = lease.committed
        every = range(begin // step * step + step, last, step)
        return sorted({page for page in (*every, lease.missed, last) if begin < page <= last})

    def take_snapshot(self, lease: Lease, pages: int, trailing: bool) -> int | None:
        """A snapshot that the step which completes so many leading pages writes; None: there is no
        memory for one.

        Args:
            trailing: it stands in for the sequence's newest tokens, until the next one does.
        """
        if self.states is None or not self.prefix_caching or pages in lease.snapshots:
            return None
        snapshot = self.states.take()
        if snapshot is not None:
            lease.snapshots[pages] = snapshot
            if trailing:
                lease.trailing.add(pages)
        return snapshot

    def resume(self, lease: Lease) -> int | None:
        """The snapshot that the next step of the sequence copies its state from; None: it has its
        state already, or none yet. What other steps write to it comes later."""
        if self.states is None or lease.resumes is None:
            return None
        page, snapshot = lease.resumes
        lease.resumes = None
        self.states.release(page)
        return snapshot

    def load(self, tokens: Tokens, max_pages: int, marks: Sequence[Mark] = ()) -> None:
        """Have host memory's part of the prefix that `open` would find on the device; arguments are
        its."""
        if self.host is not None and self.prefix_caching:
            load_prefix(self, self.host, tokens, max_pages, marks)

    def resumable(self, found: list[int]) -> int:
        """How many of these pages of the tree a sequence can go on from."""
        end, before = len(found), -1
        while end != before:
            before = end
            if self.states is not None:
                end = self.states.resumable(found[:end])
            if self.window is not None:
                end = self.window.resumable(found[:end])
        return end

    def growth(self, lease: Lease, pages: int) -> Growth:
        """What it takes that a lease grows by so many pages."""
        if self.window is None:
            return Growth(pages, 0)
        # Pages under the window, the page of the next slot, and one that the window has just left.
        most = self.window.reach + 2
        return Growth(pages, min(pages, max(0, most - len(lease.window))))

    def fits(self, growth: Growth, at_once: int) -> bool:
        """Whether leases could grow by so much, as far as is known now: pages that windows pass on
        the way come back.

        Args:
            growth: of all of them.
            at_once: pages that they grow by, all together, before windows pass any of them.
        """
        pages, stay = growth.pages, growth.stay
        if pages > self.num_free + self.num_evictable:
            return False
        return self.window is None or stay + min(at_once, pages - stay) <= self.window.available

    def grow(self, lease: Lease, total_pages: int) -> bool:
        """Make the lease at least `total_pages` pages long, evicting what must go; all or nothing.

        False: not enough is free or evictable, nothing was changed. A lease can be in its own way
        here: what it holds as `duplicates` the tree holds again. Closing and reopening it resolves
        that, so a lone sequence that fits the pool always gets there.
        """
        _require_open(lease)
        missing = total_pages - len(lease.pages)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        lease.pages += self.take(missing)
        if self.window is not None:
            lease.window += self.window.take(missing)
        return True

    def take(self, count: int) -> list[int]:
        """Free pages for the caller, who checked that so many are free or evictable."""
        short = count - self.num_free
        if short > 0:
            evicted = self.tree.evict(short)
            self._spill(evicted)
            self._drop(evicted)
            self.evicted_pages += short
        return self.allocator.take(count)

    def commit(self, lease: Lease, tokens: Tokens, length: int | None = None) -> None:
        """Enter the complete pages of the lease's computed tokens into the prefix tree, and give
        back the window layers' pages that no later query's window touches.

        Costs what is new since the last commit, however long the sequence is.

        Args:
            tokens: the user tokens of the sequence from its start, as they were given to `open`.
            length: how many of them have been computed, with the ends of the pages that they fill;
                None: all. Lets a caller pass its growing buffer without a copy.

        Raises InvariantError when that is less than what was committed or more than the lease's
        pages hold.
        """
        _require_open(lease)
        first = lease.committed
        last = self.slots.complete_pages(len(tokens) if length is None else length)
        if not first <= last <= len(lease.pages):
            raise InvariantError(
                f"commit of {last} pages on a lease with {first} committed "
                f"and {len(lease.pages)} held"
            )
        if self.prefix_caching:
            keys = page_keys(tokens, first, last, self.slots.tokens_per_page, lease.marks)
            mine = lease.pages[first:last]
            parent = lease.node.pages[-1] if lease.node.pages else None
            lease.node, held = self.tree.extend(lease.node, keys, mine)
            lease.duplicates += [own for own, kept in zip(mine, held, strict=True) if own != kept]
            lease.committed = last
            if self.host is not None:
                self.host.name_pages(parent, keys, held)
            if self.window is not None:
                begin = lease.window_first
                self.window.attach(held, lease.window[first - begin : last - begin])
            if self.states is not None:
                border = self.slots.complete_pages(len(tokens) - 1)
                self._attach_snapshots(lease, first, held, border)
        self.pass_windows(lease, last)

    def pass_windows(self, lease: Lease, pages: int) -> None:
        """Give back the window layers' pages that no window touches once so many of the lease's
        pages are computed; `commit` does it. No query of a step yet to come may look at them, and
        those of steps in flight must start behind these pages too."""
        if self.window is None:
            return
        first = lease.window_first
        count = pages - self.window.reach - first
        if count <= 0:
            return
        gone = lease.window[:count]
        del lease.window[:count]
        # Keep window pages where a cached prefix could not be resumed, so that the next request
        # can.
        begin = min(max(0, lease.missed - self.window.reach - first), count)
        end = min(max(begin, lease.missed - first), count)
        self.window.release(gone[:begin], wanted=False)
        self.window.release(gone[begin:end], wanted=True)
        self.window.release(gone[end:], wanted=False)

    def close(self, lease: Lease) -> None:
        """Give the lease back: its own pages become free, its committed prefix stays cached.

        Raises InvariantError when it is closed already.
        """
        _require_open(lease)
        lease.closed = True
        self.tree.release(lease.node)
        self.allocator.free(lease.owned)
        if self.states is not None:
            self.resume(lease)
            self.states.free(lease.snapshots.values())
            lease.snapshots = {}
        if self.window is not None:
            self.window.release(lease.window, wanted=True)
        lease.node = self.tree.root
        lease.pages, lease.window, lease.duplicates, lease.committed = [], [], [], 0

    def reset(self) -> int:
        """Forget every cached page that no open lease needs, in host memory too; returns the number
        of those on the device."""
        dropped = self.tree.evict(self.num_evictable)
        self._drop(dropped)
        if self.host is not None:
            self.host.clear()
        return len(dropped)

    def _spill(self, pages: list[int]) -> None:
        """Keep in host memory what the tree gave up, and what sequences resume from beside it."""
        if self.host is None:
            return
        self.host.store(PAGE, [(page, page) for page in pages])
        if self.window is not None:
            self.host.store(WINDOW, self.window.wanted(pages))
        if self.states is not None:
            self.host.store(STATE, self.states.wanted(pages))

    def _drop(self, pages: list[int]) -> None:
        """Free pages that the tree gave up."""
        if self.host is not None:
            self.host.drop(pages)
        self.allocator.free(pages)
        if self.window is not None:
            self.window.drop(pages)
        if self.states is not None:
            self.states.drop(pages)

    def _attach_snapshots(self, lease: Lease, first: int, held: list[int], border: int) -> None:
        """Put the snapshots that have been written beside the pages `held` of the tree, which are
        the logical pages from `first` on; `border` of the sequence's pages are known."""
        assert self.states is not None
        for count in sorted(n for n in lease.snapshots if first < n <= first + len(held)):
            page, snapshot = held[count - 1 - first], lease.snapshots.pop(count)
            passed = count % self.states.interval == 0 and count not in (lease.missed, border)
            if count in lease.trailing:
                lease.trailing.remove(count)
                if lease.trail is not None:
                    self.states.pass_by(lease.trail)
                lease.trail, passed = page, False
            self.states.attach(page, snapshot, wanted=not passed)


def _require_open(lease: Lease) -> None:
    if lease.closed:
        raise InvariantError("a closed lease was used")
