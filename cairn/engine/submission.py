"""A request in the engine as its consumer sees it. No torch here."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from cairn.engine.messages import Delta, joined
from cairn.errors import EngineDead
from cairn.types import FinishReason

FAILURES = frozenset({FinishReason.ERROR.value, FinishReason.ABORT.value})
"""Reasons of an output that did not come to its end."""


class Client(Protocol):
    """What a submission needs of the client that made it."""

    def abort(self, request_id: str) -> None:
        """Take a request back; an unknown id may just have ended."""


class Submission:
    """A request in the engine: an async iterator of its deltas, for one consumer.

    What steps add to a continuation while the consumer is busy comes as one delta: who is slower
    than the engine gets larger pieces, never later ones. A failure comes by itself.

    It ends when all continuations have ended, or after `cancel`. As a context manager it cancels
    what is unfinished when the block is left.

    Attributes:
        read: tokens of the prompt that the engine has said to have computed.

    Raises (while iterating):
        EngineDead: the engine ended before the request did.
    """

    __slots__ = (
        "_client",
        "_error",
        "_waiter",
        "_waiting",
        "cancelled",
        "id",
        "read",
        "unfinished",
    )

    def __init__(self, client: Client, request_id: str, n: int) -> None:
        self.id = request_id
        self.unfinished = n
        self.cancelled = False
        self.read = 0
        self._client = client
        # By continuation, and whether it has failed.
        self._waiting: dict[tuple[int, bool], list[Delta]] = {}
        self._error: EngineDead | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self.cancelled or self.unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return joined(self._waiting.pop(next(iter(self._waiting))))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Take back what is unfinished; iterating ends. Doing it again does nothing."""
        if self.cancelled or self.unfinished == 0 or self._error is not None:
            return
        self.cancelled = True
        self._waiting.clear()
        self._client.abort(self.id)
        self._wake()

    def take(self, delta: Delta) -> None:
        """For the client: something came from the engine."""
        if delta.finish_reason is not None:
            self.unfinished -= 1
        if not self.cancelled:
            failed = delta.finish_reason in FAILURES
            self._waiting.setdefault((delta.index, failed), []).append(delta)
            self._wake()

    def fail(self, error: EngineDead) -> None:
        """For the client: nothing more will come."""
        if self.unfinished and not self.cancelled:
            self._error = error.again()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
