"""Prompts that running requests compute, and those that wait for what they share with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cairn.engine.request import Request, State


class Computing:
    """Prompts that are being computed, found by their first page.

    Args:
        tokens_per_page: user tokens of a page.
    """

    def __init__(self, tokens_per_page: int) -> None:
        self._per_page = tokens_per_page
        self._by_page: dict[bytes, list[Request]] = {}

    def add(self, request: Request) -> None:
        """The request begins to compute its prompt. One that is too short to share stays out."""
        if request.num_prompt >= self._per_page:
            self._by_page.setdefault(self._page(request), []).append(request)

    def remove(self, request: Request) -> None:
        """The request runs no more."""
        page = self._page(request)
        others = self._by_page.get(page, [])
        others[:] = [other for other in others if other is not request]
        if not others:
            self._by_page.pop(page, None)

    def holds(self, request: Request) -> bool:
        """Whether one of them is computing a prefix that this waiting one would compute again."""
        holder = request.held_by
        if holder is not None:
            if holder.state is State.RUNNING and holder.computed < request.held_until:
                return True
            request.held_by = None
        others = self._by_page.get(self._page(request), [])
        # What has been computed can be found in the cache.
        others[:] = [other for other in others if other.computed < other.num_prompt]
        for other in others:
            shared = _common_prefix(other.prompt_view(), request.prompt_view())
            shared = min(shared, request.num_prompt - 1) // self._per_page * self._per_page
            if shared > other.computed:
                request.held_by, request.held_until = other, shared
                return True
        return False

    def _page(self, request: Request) -> bytes:
        return request.tokens[: self._per_page].tobytes()


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Number of leading tokens that two prompts share."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != b[:length])
    return int(differ[0]) if len(differ) else length
