"""Requests that wait for a grammar or for records before they are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from cairn.engine.continuation import Continuation


class Need(NamedTuple):
    """A future that a request waits for, and a function to call with its result; an exception of
    either ends the request."""

    future: Future[Any]
    take: Callable[[Any], object]


class Preparing:
    """Continuations whose grammars are compiled, or whose records are fetched."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Continuation, list[Need]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def futures(self) -> list[Future[Any]]:
        """The futures that they wait for."""
        return [need.future for _, needs in self._waiting for need in needs]

    def add(self, continuation: Continuation, needs: list[Need]) -> None:
        """Add a continuation."""
        self._waiting.append((continuation, needs))

    def join(self) -> tuple[list[Continuation], list[tuple[Continuation, BaseException]]]:
        """The continuations that are ready, and those that failed, with the error."""
        ready, refused, pending = [], [], []
        for continuation, needs in self._waiting:
            if continuation.finished:
                for need in needs:
                    need.future.cancel()
            elif not all(need.future.done() for need in needs):
                pending.append((continuation, needs))
            elif (error := _take(needs)) is not None:
                refused.append((continuation, error))
            else:
                ready.append(continuation)
        self._waiting = pending
        return ready, refused


def _take(needs: list[Need]) -> BaseException | None:
    for future, take in needs:
        try:
            take(future.result())
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request alone
            return error
    return None
