"""Snapshots of the states of recurrent layers, kept at page borders of cached prefixes.

Pages of a prefix are worthless to a recurrent layer without its state behind them. A snapshot lies
beside the page of the prefix tree after whose last token it was taken; a sequence resumes at the
deepest page of its prefix that has one. They are taken where the next request is likely to resume:
at the last page border of a prompt, where a lookup found pages but no snapshot (a branch), every so
many pages of a long prompt, and behind the last border that a decoding sequence has passed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cairn.cache.allocator import PageAllocator


class StateSnapshots:
    """The ledger of snapshots: each is free, being written, or beside a page of the tree.

    Those that sequences only passed by are given up first, then the least recently used.

    Args:
        count: snapshots that there is memory for.
        interval: pages between two of a long prompt.

    Attributes:
        beside: page of the prefix tree -> snapshot after its last token.
        resuming: page whose snapshot sequences are about to resume from -> how many are.
        evicted: snapshots that were given up to make room.
        giving_up: called with (page, snapshot) of those of them where a sequence may well resume,
            before they are.
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
        """Snapshots that there is memory for."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Those that hold nothing."""
        return self.allocator.num_free

    @property
    def num_kept(self) -> int:
        """Those beside pages of the tree."""
        return len(self.beside)

    def resumable(self, pages: Sequence[int]) -> int:
        """How many pages of this path from the root of the prefix tree a sequence can resume
        behind: up to the deepest page that has a snapshot."""
        return next((i for i in range(len(pages), 0, -1) if pages[i - 1] in self.beside), 0)

    def hold(self, page: int) -> int:
        """The snapshot beside this page of the tree, not to be given up until `release`: a sequence
        resumes from it."""
        self._passed.pop(page, None)
        self._wanted.pop(page, None)
        self.resuming[page] += 1
        return self.beside[page]

    def release(self, page: int) -> None:
        """A sequence that held the snapshot beside this page has resumed from it, or will not."""
        self.resuming[page] -= 1
        if not self.resuming[page]:
            del self.resuming[page]
            self._wanted[page] = None

    def take(self) -> int | None:
        """A snapshot to write to, giving one up if need be; None: there is no memory for any, or
        all of it is being written."""
        if not self.num_free and (self._passed or self._wanted):
            passed = bool(self._passed)
            page, _ = (self._passed or self._wanted).popitem(last=False)
            if not passed:
                self.giving_up(page, self.beside[page])
            self.allocator.free((self.beside.pop(page),))
            self.evicted += 1
        return self.allocator.take(1)[0] if self.num_free else None

    def attach(self, page: int, snapshot: int, wanted: bool) -> None:
        """The snapshot has been written; it belongs beside this page of the tree, which may have an
        equal one already.

        Args:
            wanted: a sequence may well resume there; else it was passed by.
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
        """The sequence that left a snapshot beside this page has left one behind it."""
        if self._wanted.pop(page, self) is None:
            self._passed[page] = None

    def free(self, snapshots: Iterable[int]) -> None:
        """Take back snapshots that belong beside no page."""
        self.allocator.free(list(snapshots))

    def wanted(self, pages: Iterable[int]) -> list[tuple[int, int]]:
        """(page, snapshot) of these where a sequence may well resume."""
        return [(page, self.beside[page]) for page in pages if page in self._wanted]

    def drop(self, pages: Iterable[int]) -> None:
        """The prefix tree gave these pages up; their snapshots go with them."""
        for page in pages:
            snapshot = self.beside.pop(page, None)
            if snapshot is not None:
                self._passed.pop(page, None)
                self._wanted.pop(page, None)
                self.allocator.free((snapshot,))

    def kept(self) -> list[int]:
        """Pages of the tree that have one, in the order in which they would be given up; last those
        that sequences are about to resume from."""
        return [*self._passed, *self._wanted, *self.resuming]
