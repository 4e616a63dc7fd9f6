"""The free pages of a pool."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.errors import InvariantError


class PageAllocator:
    """Allocates physical page ids 0 .. num_pages - 1, each to one holder at a time.

    The last page freed is the first allocated again: its memory is most likely still in caches.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._stack)

    @property
    def free_pages(self) -> Sequence[int]:
        """The free page ids, in no particular order; not to be changed."""
        return self._stack

    def is_free(self, page: int) -> bool:
        """Whether `page` is free."""
        return bool(self._is_free[page])

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages. Raises InvariantError when fewer are free; check `num_free`
        before."""
        if not 0 <= count <= len(self._stack):
            raise InvariantError(f"asked for {count} pages while {len(self._stack)} are free")
        if count == 0:
            return []
        taken = self._stack[-count:]
        del self._stack[-count:]
        taken.reverse()
        for page in taken:
            self._is_free[page] = 0
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Free pages. Raises InvariantError at the first that is already free or unknown."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise InvariantError(f"page {page} is not one of the pool's {self.num_pages}")
            if self._is_free[page]:
                raise InvariantError(f"page {page} was freed twice")
            self._is_free[page] = 1
            self._stack.append(page)
