"""Snapshots of the states of recurrent layers, kept at page borders of cached prefixes.

A recurrent layer cannot resume from the pages of a prefix without its state after them. A snapshot
belongs to the page of the prefix tree after whose last token it was taken; a sequence resumes at
the deepest page of its prefix that has one. They are taken where the next request is likely to
resume: at the last page border of a prompt, where a lookup found pages but no snapshot (a branch),
at regular intervals in a long prompt, and after the last border that a decoding sequence has
passed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cairn.cache.allocator import PageAllocator


class StateSnapshots:
    """The ledger of snapshots: each is free, being written, or attached to a page of the tree.

    Eviction order: first those that their sequence has passed, then the least recently used.

    Args:
        count: number of snapshots in memory.
        interval: pages between two snapshots of a long prompt.

    Attributes:
        beside: page of the prefix tree -> snapshot after its last token.
        resuming: page -> number of sequences that are about to resume from its snapshot.
        evicted: number of evicted snapshots.
        giving_up: called before eviction with (page, snapshot) of snapshots from which a sequence
            is likely to resume.
    """

    def __init__(self, count: int, interval: int) -> None:
        self.interval = interval
        self.allocator = PageAllocator(count)
        self.beside: dict[int, int] = {}
        self.evicted = 0
        self.giving_up: Callable[[int, int], object] = lambda page, own: None
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self.resuming: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """Number of snapshots in memory."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Number of free ones."""
        return self.allocator.num_free

    @property
    def num_kept(self) -> int:
        """Number of those attached to pages of the tree."""
        return len(self.beside)

    def resumable(self, pages: Sequence[int]) -> int:
        """Number of pages of this path from the root of the prefix tree after which a sequence can
        resume: up to the deepest page with a snapshot."""
        return next((i for i in range(len(pages), 0, -1) if pages[i - 1] in self.beside), 0)

    def hold(self, page: int) -> int:
        """Hold the snapshot of this page of the tree until `release`, because a sequence resumes
        from it."""
        self._passed.pop(page, None)
        self._wanted.pop(page, None)
        self.resuming[page] += 1
        return self.beside[page]

    def release(self, page: int) -> None:
        """Undo a `hold`: the sequence has resumed, or will not."""
        self.resuming[page] -= 1
        if not self.resuming[page]:
            del self.resuming[page]
            self._wanted[page] = None

    def take(self) -> int | None:
        """Allocate a snapshot to write to, evicting one if necessary; None: none is available."""
        if not self.num_free and (self._passed or self._wanted):
            passed = bool(self._passed)
            page, _ = (self._passed or self._wanted).popitem(last=False)
            if not passed:
                self.giving_up(page, self.beside[page])
            self.allocator.free((self.beside.pop(page),))
            self.evicted += 1
        return self.allocator.take(1)[0] if self.num_free else None

    def attach(self, page: int, snapshot: int, wanted: bool) -> None:
        """Attach a written snapshot to a page of the tree; it is freed if the page has one already.

        Args:
            wanted: whether a sequence is likely to resume there; otherwise it is evicted first.
        """
        if page in self.beside:
            self.allocator.free((snapshot,))
        else:
            self.beside[page] = snapshot
        if page in self.resuming or page in self._wanted:
            return
        self._passed.pop(page, None)
        (self._wanted if wanted else self._passed)[page] = None

    def pass_by(self, page: int) -> None:
        """Mark the snapshot of this page as passed: its sequence has written a later one."""
        if self._wanted.pop(page, self) is None:
            self._passed[page] = None

    def free(self, snapshots: Iterable[int]) -> None:
        """Free snapshots that are not attached to a page."""
        self.allocator.free(list(snapshots))

    def wanted(self, pages: Iterable[int]) -> list[tuple[int, int]]:
        """(page, snapshot) of those from which a sequence is likely to resume."""
        return [(page, self.beside[page]) for page in pages if page in self._wanted]

    def drop(self, pages: Iterable[int]) -> None:
        """Free the snapshots of pages that the prefix tree evicted."""
        for page in pages:
            snapshot = self.beside.pop(page, None)
            if snapshot is not None:
                self._passed.pop(page, None)
                self._wanted.pop(page, None)
                self.allocator.free((snapshot,))

    def kept(self) -> list[int]:
        """Pages of the tree with a snapshot, in order of eviction; those that sequences are about
        to resume from are last."""
        return [*self._passed, *self._wanted, *self.resuming]
