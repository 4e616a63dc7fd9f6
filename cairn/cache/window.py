"""The pages of layers that see a window alone, where other layers of the model see everything.

Such a layer needs a sequence's pages only as long as a query may still look at them. So the layers
have a pool of their own, and beside its pages of the other layers a sequence holds a page of this
pool for each of its last logical pages; the others it gives back.

A cached prefix is of use only where it can be resumed: the window before that point must be there.
So a page that a sequence gives back stays beside the prefix tree's page of the same tokens, as long
as there is room. Those that windows only passed by on their way go first; those where sequences
ended, were resumed or would have been resumed go after them, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cairn.cache.allocator import PageAllocator
from cairn.errors import InvariantError


class WindowPages:
    """The ledger of the window layers' pool: each page is free, held by leases or kept for reuse.

    Args:
        num_pages: pages in the pool.
        reach: pages before its own that a query's window may touch.

    Attributes:
        allocator: the free pages.
        users: by page, the open leases that hold it.
        beside: page of the prefix tree -> page of this pool with the same tokens.
        evicted: kept pages that were given up to make room.
        giving_up: called with (page of the prefix tree, page beside it) of those of them where a
            sequence may well resume, before they are.
    """

    def __init__(self, num_pages: int, reach: int) -> None:
        self.reach = reach
        self.allocator = PageAllocator(num_pages)
        self.users = [0] * num_pages
        self.beside: dict[int, int] = {}
        self.evicted = 0
        self.giving_up: Callable[[int, int], object] = lambda page, own: None
        # By window page: the page of the prefix tree with the same tokens; -1: none.
        self._tree_page = [-1] * num_pages
        self._wanted = bytearray(num_pages)
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._resumable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self.allocator.num_free

    @property
    def num_kept(self) -> int:
        """Pages that no lease holds, kept for sequences that resume there."""
        return len(self._passed) + len(self._resumable)

    @property
    def available(self) -> int:
        """Pages that `take` could hand out now."""
        return self.num_free + self.num_kept

    def kept(self) -> list[int]:
        """Pages that no lease holds, in the order in which they would be given up."""
        return [*self._passed, *self._resumable]

    def resumable(self, pages: Sequence[int]) -> int:
        """How many of these pages, a path of the prefix tree from its root, a sequence can go on
        from: the most after which everything under its window is there."""
        end = at = len(pages)
        while at > max(0, end - self.reach):
            at -= 1
            if pages[at] not in self.beside:
                end = at
        return end

    def hold(self, tree_pages: Sequence[int]) -> list[int]:
        """The pages beside these, now held by one more lease: a sequence resumes behind them."""
        held = [self.beside[page] for page in tree_pages]
        for page in held:
            if self.users[page] == 0:
                del self._kept_in(page)[page]
            self.users[page] += 1
            self._wanted[page] = 1
        return held

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages, giving up kept ones if need be. Raises InvariantError if fewer
        are available; check `available` before."""
        short = count - self.num_free
        for _ in range(min(short, self.num_kept)):
            page, _ = (self._passed or self._resumable).popitem(last=False)
            if self._wanted[page]:
                self.giving_up(self._tree_page[page], page)
            del self.beside[self._tree_page[page]]
            self._free(page)
            self.evicted += 1
        taken = self.allocator.take(count)
        for page in taken:
            self.users[page] = 1
        return taken

    def attach(self, tree_pages: Iterable[int], held: Iterable[int]) -> None:
        """Link held window pages to the pages of the prefix tree with the same tokens, unless those
        have a window page already."""
        for tree_page, page in zip(tree_pages, held, strict=True):
            if self.beside.setdefault(tree_page, page) == page:
                self._tree_page[page] = tree_page

    def release(self, pages: Iterable[int], wanted: bool) -> None:
        """A lease gives pages back.

        Args:
            wanted: a sequence may well resume behind them.

        Raises InvariantError for a page that no lease holds.
        """
        for page in pages:
            if self.users[page] == 0:
                raise InvariantError(f"window page {page} was given back twice")
            self.users[page] -= 1
            self._wanted[page] |= wanted
            if self.users[page] == 0:
                if self._tree_page[page] < 0:
                    self._free(page)
                else:
                    self._kept_in(page)[page] = None

    def wanted(self, tree_pages: Iterable[int]) -> list[tuple[int, int]]:
        """(page of the prefix tree, page beside it) of these where a sequence may well resume."""
        pairs = ((page, self.beside[page]) for page in tree_pages if page in self.beside)
        return [(page, own) for page, own in pairs if self._wanted[own]]

    def drop(self, tree_pages: Iterable[int]) -> None:
        """The prefix tree gave these pages up: nothing can lie beside them any more."""
        for tree_page in tree_pages:
            page = self.beside.pop(tree_page, None)
            if page is not None:
                del self._kept_in(page)[page]
                self._free(page)

    def _kept_in(self, page: int) -> OrderedDict[int, None]:
        return self._resumable if self._wanted[page] else self._passed

    def _free(self, page: int) -> None:
        self._tree_page[page] = -1
        self._wanted[page] = 0
        self.allocator.free((page,))
