"""The consumer's view of a request in the engine. No torch here."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from cairn.engine.messages import Delta, joined
from cairn.errors import EngineDead
from cairn.types import FinishReason

FAILURES = frozenset({FinishReason.ERROR.value, FinishReason.ABORT.value})
"""Finish reasons of incomplete outputs."""


class Client(Protocol):
    """The part of the client that a submission needs."""

    def abort(self, request_id: str) -> None:
        """Abort a request; unknown ids are ignored."""


class Submission:
    """A request in the engine: an async iterator of its deltas, for one consumer.

    Deltas of a continuation that arrive while the consumer is busy are joined into one: a slow
    consumer gets larger pieces without falling behind. A failure is a delta of its own.

    It ends when all continuations have ended, or after `cancel`. As a context manager it cancels
    what is unfinished when the block is left.

    Attributes:
        read: number of prompt tokens that the engine has reported as computed.

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
        # Key: continuation, and whether it has failed.
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
        """Abort unfinished continuations and end the iteration. Idempotent."""
        if self.cancelled or self.unfinished == 0 or self._error is not None:
            return
        self.cancelled = True
        self._waiting.clear()
        self._client.abort(self.id)
        self._wake()

    def take(self, delta: Delta) -> None:
        """Called by the client with each delta from the engine."""
        if delta.finish_reason is not None:
            self.unfinished -= 1
        if not self.cancelled:
            failed = delta.finish_reason in FAILURES
            self._waiting.setdefault((delta.index, failed), []).append(delta)
            self._wake()

    def fail(self, error: EngineDead) -> None:
        """Called by the client when the engine has ended."""
        if self.unfinished and not self.cancelled:
            self._error = error.again()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
