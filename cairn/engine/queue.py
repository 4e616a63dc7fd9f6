"""The queue of waiting requests, in order of admission."""

from __future__ import annotations

import heapq

from cairn.engine.request import Request, State


class WaitingQueue:
    """A heap of requests by their order. Requests that finish while they wait are removed when they
    come up, or when they are half of the heap, so that aborted requests do not accumulate."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._finished = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> Request:
        """The next request in order; it may be finished."""
        return self._heap[0][1]

    def push(self, request: Request) -> None:
        """Queue a request."""
        heapq.heappush(self._heap, (request.order, request))

    def pop(self) -> Request:
        """Remove the first request."""
        return heapq.heappop(self._heap)[1]

    def forget_finished(self) -> None:
        """Report that a waiting request has finished."""
        self._finished += 1
        if 2 * self._finished > len(self._heap):
            self._heap = [e for e in self._heap if e[1].state is not State.FINISHED]
            heapq.heapify(self._heap)
            self._finished = 0
