"""The life of a page: free, owned by a lease, cached in the prefix tree, evicted, free again."""

from __future__ import annotations

from cairn.cache.allocator import PageAllocator
from cairn.cache.landmarks import SlotMap
from cairn.cache.radix import Node, RadixTree, Tokens, page_keys
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
        closed: the lease has been given back.
    """

    __slots__ = ("cached_pages", "closed", "committed", "duplicates", "node", "pages")

    def __init__(self, node: Node, pages: list[int]) -> None:
        self.pages = pages
        self.cached_pages = len(pages)
        self.committed = len(pages)
        self.duplicates: list[int] = []
        self.node = node
        self.closed = False

    @property
    def owned(self) -> list[int]:
        """Pages that belong to this lease alone."""
        return self.duplicates + self.pages[self.committed :]


class PageCache:
    """All pages of a pool: the free, those of cached prefixes, those of running sequences.

    Several leases may share the pages of a common prefix. A cached page is dropped only when pages
    are needed and no open lease uses it or anything that continues it; the least recently released
    goes first.

    Args:
        num_pages: pages in the pool.
        slots: how tokens fill pages.
        prefix_caching: False: nothing is kept or found, a page lives as long as its lease.

    Attributes:
        prefix_queries, prefix_hits: user tokens looked up by `open`, and those of them found.
        evicted_pages: cached pages dropped to make room.
    """

    def __init__(self, num_pages: int, slots: SlotMap, prefix_caching: bool = True) -> None:
        self.slots = slots
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
        """Pages that `grow` could hand out now: free or evictable."""
        return self.num_free + self.num_evictable

    def open(self, tokens: Tokens, max_pages: int) -> Lease:
        """Start a lease on the longest cached prefix of complete pages of `tokens`, and lock it.

        Args:
            tokens: user token ids of the sequence.
            max_pages: take at most this many cached pages, so that some token is left to compute.

        Raises BadRequest for a token id that does not fit 32 bits.
        """
        if not self.prefix_caching:
            return Lease(*self.tree.acquire((), 0))
        node, pages = self.tree.acquire(tokens, max_pages)
        self.prefix_queries += len(tokens)
        self.prefix_hits += len(pages) * self.slots.tokens_per_page
        return Lease(node, pages)

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
        short = missing - self.num_free
        if short > 0:
            self.allocator.free(self.tree.evict(short))
            self.evicted_pages += short
        lease.pages += self.allocator.take(missing)
        return True

    def commit(self, lease: Lease, tokens: Tokens, length: int | None = None) -> None:
        """Enter the complete pages of the lease's computed tokens into the prefix tree.

        Costs what is new since the last commit, however long the sequence is.

        Args:
            tokens: the user tokens of the sequence from its start, as they were given to `open`.
            length: how many of them have their keys and values in the cache, and the landmarks of
                the pages that they fill; None: all. Lets a caller pass its growing buffer without a
                copy.

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
        if not self.prefix_caching:
            return
        keys = page_keys(tokens, first, last, self.slots.tokens_per_page)
        lease.node, duplicates = self.tree.extend(lease.node, keys, lease.pages[first:last])
        lease.duplicates += duplicates
        lease.committed = last

    def close(self, lease: Lease) -> None:
        """Give the lease back: its own pages become free, its committed prefix stays cached.

        Raises InvariantError when it is closed already.
        """
        _require_open(lease)
        lease.closed = True
        self.tree.release(lease.node)
        self.allocator.free(lease.owned)
        lease.node = self.tree.root
        lease.pages, lease.duplicates, lease.committed = [], [], 0

    def reset(self) -> int:
        """Forget every cached page that no open lease needs; returns their number."""
        dropped = self.tree.evict(self.num_evictable)
        self.allocator.free(dropped)
        return len(dropped)


def _require_open(lease: Lease) -> None:
    if lease.closed:
        raise InvariantError("a closed lease was used")
