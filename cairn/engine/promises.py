"""Pages reserved for the growth of running requests, which admission does not hand out."""

from __future__ import annotations

from collections.abc import Iterable

from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import NO_GROWTH, Growth, PageCache
from cairn.engine.request import Request


class Promises:
    """The reserved growth of all running requests, computed once per step that admits requests.

    Args:
        cache: the pages.
        slots: slot arithmetic.
    """

    def __init__(self, cache: PageCache, slots: SlotMap) -> None:
        self._cache, self._slots = cache, slots
        self._total: Growth | None = None

    def forget(self) -> None:
        """Discard the sum: the running requests have changed."""
        self._total = None

    def add(self, request: Request) -> None:
        """Add a request that starts to run."""
        if self._total is not None:
            self._total += self._of(request)

    def of_all(self, running: Iterable[Request]) -> Growth:
        """The reserved pages of these requests, which must be all that run."""
        if self._total is None:
            self._total = sum((self._of(request) for request in running), NO_GROWTH)
        return self._total

    def _of(self, request: Request) -> Growth:
        """Pages for the rest of a request's known tokens, and one more page if it can still be
        needed."""
        if request.lease is None:
            return NO_GROWTH
        soon = int(self._slots.pages_for(len(request.tokens))) + 1
        most = int(self._slots.pages_for(request.most_computed))
        return self._cache.growth(request.lease, min(soon, most) - len(request.lease.pages))
