"""Pages reserved for the growth of running requests, which admission does not hand out."""

from __future__ import annotations

from collections.abc import Iterable

from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import NO_GROWTH, Growth, PageCache
from cairn.engine.request import Request


class Promises:
    """The growth of all running requests, worked out once for the requests that a step admits.

    Args:
        cache: the pages.
        slots: slot arithmetic.
    """

    def __init__(self, cache: PageCache, slots: SlotMap) -> None:
        self._cache, self._slots = cache, slots
        self._total: Growth | None = None

    def forget(self) -> None:
        """The running requests have changed."""
        self._total = None

    def add(self, request: Request) -> None:
        """One more request runs."""
        if self._total is not None:
            self._total += self._of(request)

    def of_all(self, running: Iterable[Request]) -> Growth:
        """That of these, which are all that run."""
        if self._total is None:
            self._total = sum((self._of(request) for request in running), NO_GROWTH)
        return self._total

    def _of(self, request: Request) -> Growth:
        """The rest of its known tokens, and one page more if that can still come to be needed."""
        if request.lease is None:
            return NO_GROWTH
        soon = int(self._slots.pages_for(len(request.tokens))) + 1
        most = int(self._slots.pages_for(request.most_computed))
        return self._cache.growth(request.lease, min(soon, most) - len(request.lease.pages))
