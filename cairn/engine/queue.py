"""Requests that wait, in the order in which they are admitted."""

from __future__ import annotations

import heapq

from cairn.engine.request import Request, State


class WaitingQueue:
    """A heap of requests by their order. Those that finish while they wait stay until they come up,
    or until they are the half of it: prompts that come and go while the running rows take long must
    not pile up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._finished = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> Request:
        """The next one in order; it may be finished."""
        return self._heap[0][1]

    def push(self, request: Request) -> None:
        """Queue a request."""
        heapq.heappush(self._heap, (request.order, request))

    def pop(self) -> Request:
        """Take the first one out."""
        return heapq.heappop(self._heap)[1]

    def forget_finished(self) -> None:
        """A waiting request has finished."""
        self._finished += 1
        if 2 * self._finished > len(self._heap):
            self._heap = [e for e in self._heap if e[1].state is not State.FINISHED]
            heapq.heapify(self._heap)
            self._finished = 0
