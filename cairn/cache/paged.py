"""The life of a page: free, owned by a lease, cached in the prefix tree, evicted, free again.

What is evicted may stay in host memory (`cairn.cache.host`) and come back from there.

Where some layers attend to a window only (`cairn.cache.window`), a lease also holds window pages
for its last logical pages. Where some are recurrent (`cairn.cache.states`), snapshots of their
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
    """The pages held by one sequence. Only `PageCache` changes it.

    Attributes:
        pages: physical page of each logical page. Entries never change while the lease is open,
            only new ones are appended; empty once closed.
        cached_pages: leading pages that were found in the cache when the lease was opened.
        committed: leading pages whose tokens are in the prefix tree.
        duplicates: committed pages that the lease still owns, because the tree had an equal page
            already.
        node: where the committed prefix ends in the tree; locked while the lease is open.
        marks: marks of tokens whose ids do not identify their content (images).
        window: pages of the window layers for the last logical pages; empty without such a pool.
        missed: pages of the cached prefix that could not be used because the window before its end,
            or a snapshot after it, was missing.
        resumes: page of the tree with the snapshot that the sequence still has to copy its state
            from.
        snapshots: number of leading pages -> snapshot that a step in flight writes after them.
        trailing: keys of `snapshots` whose snapshot is replaced by the lease's next one.
        trail: page of the tree with the last of these.
        closed: whether the lease was closed.
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
        """Number of pages owned by this lease only."""
        return self.duplicates + self.pages[self.committed :]

    @property
    def window_first(self) -> int:
        """The first logical page that still has a page of the window layers."""
        return len(self.pages) - len(self.window)


@dataclass(frozen=True, slots=True)
class Growth:
    """Pages needed for leases to grow.

    Attributes:
        pages: number of pages.
        stay: number of window pages for these that are not freed while they grow.
    """

    pages: int = 0
    stay: int = 0

    def __add__(self, other: Self) -> Self:
        """The sum of both."""
        return type(self)(self.pages + other.pages, self.stay + other.stay)


NO_GROWTH = Growth()


class PageCache:
    """All pages of a pool: free pages, pages of cached prefixes, pages of running sequences.

    Several leases may share the pages of a common prefix. A cached page is dropped only when pages
    are needed and no open lease uses it or anything that continues it; the least recently released
    goes first.

    Args:
        num_pages: pages in the pool.
        slots: slot arithmetic.
        prefix_caching: False: no prefix is cached; pages are freed with their lease.
        window: the pages of window layers, if those have a pool of their own.
        states: the snapshots of recurrent layers, if any.
        host: keeps records of evicted pages; None: they are lost.

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
        """Number of pages in the prefix tree, in use or not."""
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
        """Number of pages that `grow` could allocate now: free or evictable, in every pool."""
        pages = self.allocator.num_free + self.tree.num_evictable
        return pages if self.window is None else min(pages, self.window.available)

    @property
    def spare(self) -> int:
        """Sum of free and evictable pages over all pools; grows whenever a page is released."""
        pages = self.num_free + self.num_evictable
        return pages if self.window is None else pages + self.window.available

    def open(self, tokens: Tokens, max_pages: int, marks: Sequence[Mark] = ()) -> Lease:
        """Start a lease on the longest cached prefix of complete pages of `tokens`, and lock it.

        With window layers it is the longest prefix with all window pages before its end; with
        recurrent layers the longest with a snapshot at its end.

        Args:
            tokens: user token ids of the sequence.
            max_pages: take at most this many cached pages, so that some token is left to compute.
            marks: marks of tokens whose ids do not identify their content; part of the pages' keys.

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
        """Numbers of leading pages after which a prefill should write a snapshot, ascending; see
        `cairn.cache.states`. Prefill chunks end at each of them.

        Args:
            known: number of tokens to compute, plus one that follows.
        """
        if self.states is None or not self.prefix_caching or not self.states.count:
            return []
        last, step = self.slots.complete_pages(known - 1), self.states.interval
        begin = lease.committed
        every = range(begin // step * step + step, last, step)
        return sorted({page for page in (*every, lease.missed, last) if begin < page <= last})

    def take_snapshot(self, lease: Lease, pages: int, trailing: bool) -> int | None:
        """Allocate a snapshot for the step that completes `pages` leading pages; None: no memory
        for one.

        Args:
            trailing: the snapshot is replaced by the sequence's next one.
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
        """The snapshot from which the sequence's next step copies its state; None: the sequence has
        its state already, or starts from zeros. Other steps overwrite the snapshot only later."""
        if self.states is None or lease.resumes is None:
            return None
        page, snapshot = lease.resumes
        lease.resumes = None
        self.states.release(page)
        return snapshot

    def load(self, tokens: Tokens, max_pages: int, marks: Sequence[Mark] = ()) -> None:
        """Load the part of a prefix that is in host memory to the device, so that `open` finds it;
        same arguments as `open`."""
        if self.host is not None and self.prefix_caching:
            load_prefix(self, self.host, tokens, max_pages, marks)

    def resumable(self, found: list[int]) -> int:
        """Number of these pages of the tree that a sequence can resume from."""
        end, before = len(found), -1
        while end != before:
            before = end
            if self.states is not None:
                end = self.states.resumable(found[:end])
            if self.window is not None:
                end = self.window.resumable(found[:end])
        return end

    def growth(self, lease: Lease, pages: int) -> Growth:
        """The growth of a lease by `pages` pages."""
        if self.window is None:
            return Growth(pages, 0)
        # Pages of the window, the page of the next slot, and one that the window has just left.
        most = self.window.reach + 2
        return Growth(pages, min(pages, max(0, most - len(lease.window))))

    def fits(self, growth: Growth, at_once: int) -> bool:
        """Whether leases can grow by this much; window pages that windows pass on the way are
        freed.

        Args:
            growth: total growth.
            at_once: pages that they grow by, in sum, before any window page is freed.
        """
        pages, stay = growth.pages, growth.stay
        if pages > self.num_free + self.num_evictable:
            return False
        return self.window is None or stay + min(at_once, pages - stay) <= self.window.available

    def grow(self, lease: Lease, total_pages: int) -> bool:
        """Make the lease at least `total_pages` pages long, evicting pages if necessary; all or
        nothing.

        Returns False if not enough pages are free or evictable. `drop_duplicates` may free some: a
        single sequence that fits the pool then always succeeds.
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

    def drop_duplicates(self, lease: Lease) -> bool:
        """Give the lease the tree's pages in place of its `duplicates`, and free these; returns
        whether it had any. Steps in flight must not read them, later ones use `lease.pages`."""
        _require_open(lease)
        if not lease.duplicates:
            return False
        lease.pages[: lease.committed] = self.tree.path(lease.node)
        self.allocator.free(lease.duplicates)
        lease.duplicates = []
        if self.window is not None:
            pages = lease.pages[lease.window_first : lease.committed]
            own = lease.window[: len(pages)]
            lease.window[: len(pages)] = self.window.exchange(pages, own)
        return True

    def take(self, count: int) -> list[int]:
        """Allocate pages for the caller, who has checked that enough are free or evictable."""
        short = count - self.num_free
        if short > 0:
            evicted = self.tree.evict(short)
            self._spill(evicted)
            self._drop(evicted)
            self.evicted_pages += short
        return self.allocator.take(count)

    def commit(self, lease: Lease, tokens: Tokens, length: int | None = None) -> None:
        """Add the complete pages of the lease's computed tokens to the prefix tree, and release
        window pages that no later query's window touches.

        The cost is proportional to what is new since the last commit.

        Args:
            tokens: the user tokens of the sequence from its start, as they were given to `open`.
            length: number of computed tokens, including the landmarks of the pages that they fill;
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
        """Release the window pages that no window touches once `pages` of the lease's pages are
        computed; called by `commit`. No query of a later step may read them, and queries of steps
        in flight must start after these pages too."""
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
        """Close the lease: its own pages become free, its committed prefix stays cached.

        Raises InvariantError if it is already closed.
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
        """Evict every cached page that no open lease needs, in host memory too; returns the number
        of those on the device."""
        dropped = self.tree.evict(self.num_evictable)
        self._drop(dropped)
        if self.host is not None:
            self.host.clear()
        return len(dropped)

    def _spill(self, pages: list[int]) -> None:
        """Store pages evicted from the tree in host memory, with their window pages and
        snapshots."""
        if self.host is None:
            return
        self.host.store(PAGE, [(page, page) for page in pages])
        if self.window is not None:
            self.host.store(WINDOW, self.window.wanted(pages))
        if self.states is not None:
            self.host.store(STATE, self.states.wanted(pages))

    def _drop(self, pages: list[int]) -> None:
        """Free pages that the tree evicted."""
        if self.host is not None:
            self.host.drop(pages)
        self.allocator.free(pages)
        if self.window is not None:
            self.window.drop(pages)
        if self.states is not None:
            self.states.drop(pages)

    def _attach_snapshots(self, lease: Lease, first: int, held: list[int], border: int) -> None:
        """Attach written snapshots to the pages `held` of the tree, which are the logical pages
        from `first` on; `border` pages of the sequence are known."""
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
