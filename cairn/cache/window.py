"""Pages of window layers, in models whose other layers attend to the whole sequence.

A window layer needs a page only as long as a query's window can touch it. So these layers have a
pool of their own, and a sequence holds pages of this pool for its last logical pages only.

A cached prefix can only be resumed where the window before that point is cached. So a released
window page stays attached to the prefix tree's page of the same tokens until its memory is needed.
Pages that windows only passed are evicted first; those where sequences ended, were resumed or would
have been resumed are evicted after them, least recently used first.
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
        reach: most pages before its own that a query's window touches.

    Attributes:
        allocator: the free pages.
        users: by page, number of open leases that hold it.
        beside: page of the prefix tree -> page of this pool with the same tokens.
        evicted: number of evicted pages.
        giving_up: called before eviction with (page of the prefix tree, window page) of pages at
            which a sequence is likely to resume.
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
        """Number of free pages."""
        return self.allocator.num_free

    @property
    def num_kept(self) -> int:
        """Number of pages that no lease holds, kept for sequences that resume there."""
        return len(self._passed) + len(self._resumable)

    @property
    def available(self) -> int:
        """Number of pages that `take` could allocate now."""
        return self.num_free + self.num_kept

    def kept(self) -> list[int]:
        """Pages that no lease holds, in order of eviction."""
        return [*self._passed, *self._resumable]

    def resumable(self, pages: Sequence[int]) -> int:
        """Number of these pages, a path from the root of the prefix tree, after which a sequence
        can resume: the largest number with all window pages before its end."""
        end = at = len(pages)
        while at > max(0, end - self.reach):
            at -= 1
            if pages[at] not in self.beside:
                end = at
        return end

    def hold(self, tree_pages: Sequence[int]) -> list[int]:
        """Hold the window pages of these for a lease that resumes after them."""
        held = [self.beside[page] for page in tree_pages]
        for page in held:
            if self.users[page] == 0:
                del self._kept_in(page)[page]
            self.users[page] += 1
            self._wanted[page] = 1
        return held

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages, evicting kept ones if necessary. Raises InvariantError if fewer
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

    def exchange(self, tree_pages: Sequence[int], held: Sequence[int]) -> list[int]:
        """Hold the window pages of these pages of the prefix tree instead of a lease's own ones;
        those that have none get the lease's."""
        self.attach(tree_pages, held)
        found = list(held)
        for i, (tree_page, page) in enumerate(zip(tree_pages, held, strict=True)):
            if self.beside[tree_page] != page:
                (found[i],) = self.hold([tree_page])
                self.release([page], wanted=False)
        return found

    def release(self, pages: Iterable[int], wanted: bool) -> None:
        """Release pages of a lease.

        Args:
            wanted: whether a sequence is likely to resume after them.

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
        """(page of the prefix tree, window page) of those at which a sequence is likely to
        resume."""
        pairs = ((page, self.beside[page]) for page in tree_pages if page in self.beside)
        return [(page, own) for page, own in pairs if self._wanted[own]]

    def drop(self, tree_pages: Iterable[int]) -> None:
        """Free the window pages of pages that the prefix tree evicted."""
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
