"""Requests with equal prefixes: what one is computing another waits for, and pages that both have
computed are held once when memory is short."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import numpy as np

from cairn.cache.paged import PageCache
from cairn.cache.radix import page_keys
from cairn.engine.planned_step import PlannedStep
from cairn.engine.request import Request, State


class Computing:
    """Prompts that are being computed, indexed by their first page that is not in the cache yet:
    prompts that share no more than cached pages are never compared.

    Args:
        tokens_per_page: user tokens of a page.
    """

    def __init__(self, tokens_per_page: int) -> None:
        self._per_page = tokens_per_page
        # Number of tokens before that page -> tokens of the page -> requests.
        self._by_page: dict[int, dict[bytes, list[Request]]] = {}
        self._places: dict[Request, tuple[int, bytes]] = {}

    def add(self, request: Request) -> None:
        """Add a request that begins to compute its prompt. Partial pages cannot be shared."""
        begin = request.computed
        if begin + self._per_page <= request.num_prompt:
            page = self._page(request, begin)
            self._places[request] = begin, page
            self._by_page.setdefault(begin, {}).setdefault(page, []).append(request)

    def remove(self, request: Request) -> None:
        """Remove a request whose prompt is computed or given up."""
        place = self._places.pop(request, None)
        if place is not None:
            begin, page = place
            pages = self._by_page[begin]
            pages[page].remove(request)
            if not pages[page]:
                del pages[page]
            if not pages:
                del self._by_page[begin]

    def holds(self, request: Request) -> bool:
        """Whether another request is computing a prefix that this waiting request would compute
        again."""
        holder = request.held_by
        if holder is not None:
            if holder.state is State.RUNNING and holder.computed < request.held_until:
                return True
            request.held_by = None
        for begin, pages in self._by_page.items():
            if request.num_prompt <= begin + self._per_page:
                continue
            for other in pages.get(self._page(request, begin), ()):
                shared = _common_prefix(other, request)
                shared = min(shared, request.num_prompt - 1) // self._per_page * self._per_page
                if shared > other.computed:
                    request.held_by, request.held_until = other, shared
                    return True
        return False

    def _page(self, request: Request, begin: int) -> bytes:
        page = begin // self._per_page
        (key,) = page_keys(request.tokens, page, page + 1, self._per_page, request.marks)
        return key


class Duplicates:
    """Pages that requests hold beside equal ones of the prefix tree, freed when memory is short.

    Args:
        cache: the pages.
    """

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        # Requests whose page tables the runner does not have yet.
        self._moved: list[Request] = []

    def free(self, requests: Iterable[Request]) -> bool:
        """Free those of running requests that no step in flight runs, for it would still read them;
        returns whether there were any."""
        found = [
            r for r in requests if r.lease is not None and self._cache.drop_duplicates(r.lease)
        ]
        for request in found:
            request.granted = 0
        self._moved += found
        return bool(found)

    def announce(self, draft: PlannedStep) -> None:
        """Add the page tables that have changed to a step that will run."""
        for request in self._moved:
            # Others were retracted, or are announced when their row runs.
            if request.state is State.RUNNING and request.opened and request.granted == 0:
                draft.announce(request, self._cache)
        self._moved.clear()


def _common_prefix(one: Request, other: Request) -> int:
    """Number of leading tokens that two prompts share."""
    a, b = one.prompt_view(), other.prompt_view()
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    length = int(differ[0]) if len(differ) else length
    for mine, theirs in zip_longest(one.marks, other.marks):
        if mine != theirs:
            first = min(mark.first for mark in (mine, theirs) if mark is not None)
            return min(length, first)
    return length
