"""Timing of the load: arrivals, periodic work, clients that disconnect early.

All measurements of a server use them.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from cairn.bench.serve.exchange import Outcome
from cairn.errors import BadConfig, CairnError

T = TypeVar("T")

FIRST_GUESS_SECONDS = 1.0
MEMORY = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """Arrival process of requests. Raises BadConfig for invalid values and for a pace without end.

    Attributes:
        rate: requests per second; inf sends as soon as `max_concurrency` allows.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1
            comes in bursts, above 1 is more even.
        max_concurrency: requests in flight at most; None: no limit.
        count: requests in all; None: until `duration` is over.
        duration: seconds after which no request is sent any more; None: no limit.
        seed: of the gaps.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    count: int | None = None
    duration: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness"):
            value = getattr(self, name)
            if not value > 0:
                raise BadConfig(f"{name} must be above 0, not {value}")
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise BadConfig(f"duration must be above 0 and finite, not {self.duration}")
        if self.count is None and self.duration is None:
            raise BadConfig("the load has no end", "Give a number of requests or a duration")
        if self.count is None and math.isinf(self.rate) and self.max_concurrency is None:
            hint = "Give --request-rate or --max-concurrency"
            raise BadConfig("a duration alone would send requests without limit", hint)

    def gap(self, rng: random.Random) -> float:
        """Seconds to the next arrival."""
        if math.isinf(self.rate):
            return 0.0
        return rng.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))


async def drive(pace: Pace, work: Callable[[int, float], Coroutine[Any, Any, None]]) -> None:
    """Start `work(index, due)` at each arrival and wait for all of it.

    `due` is when the request should have gone by the arrivals alone: what it waited for its place
    under `max_concurrency` is the difference to the moment it starts.
    """
    rng = random.Random(pace.seed)
    places = asyncio.Semaphore(pace.max_concurrency) if pace.max_concurrency else None
    began = time.perf_counter()
    end = math.inf if pace.duration is None else began + pace.duration
    due, index = began, 0
    async with asyncio.TaskGroup() as group:
        while pace.count is None or index < pace.count:
            due += pace.gap(rng)
            if due >= end:
                break
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if places is not None and not await _before(end, places.acquire()):
                break
            now = time.perf_counter()
            if now >= end:
                break
            task = group.create_task(work(index, now if math.isinf(pace.rate) else due))
            if places is not None:
                task.add_done_callback(lambda _: places.release())
            index += 1


async def _before(end: float, awaitable: Awaitable[object]) -> bool:
    """Wait for it, at most until `end`; whether it came."""
    # asyncio.wait_for of Python 3.11 loses a cancellation that comes together with the result.
    try:
        async with asyncio.timeout(None if math.isinf(end) else end - time.perf_counter()):
            await awaitable
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def every(seconds: float, call: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call at once and then every `seconds`, on a fixed grid, while the block runs."""

    async def repeat() -> None:
        due = time.perf_counter()
        while True:
            await call()
            due = max(due + seconds, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())

    async with asyncio.TaskGroup() as group:
        task = group.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()


class Leavers:
    """Clients that close the connection at a random moment of their request's usual time.

    Some of them are served before that moment, so more clients are told to leave than `fraction`.

    Args:
        fraction: of the requests, in [0, 1].
        seed: of who leaves and when.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction = fraction
        self._rng = random.Random(f"leave/{seed}")
        self._usual: dict[str, float] = {}
        self._told, self._left = 1, 1

    def leave_after(self, kind: str) -> float | None:
        """Seconds after which the next client of this kind leaves; None: it stays."""
        chance = self._fraction * self._told / self._left
        leaves, moment = self._rng.random() < chance, self._rng.random()
        return moment * self._usual.get(kind, FIRST_GUESS_SECONDS) if leaves else None

    def learn(self, outcome: Outcome, leave_after: float | None) -> None:
        """Record the duration of a request of a kind, and whether a client that was told to leave
        did.

        Args:
            outcome: of an ended request.
            leave_after: what this client was told.
        """
        if outcome.complete:
            before = self._usual.get(outcome.kind, outcome.e2e)
            self._usual[outcome.kind] = before + MEMORY * (outcome.e2e - before)
        if leave_after is not None and outcome.error is None:
            self._told += 1
            self._left += outcome.aborted


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run; an error of this package inside task groups is raised by itself."""
    try:
        return asyncio.run(main)
    except BaseExceptionGroup as group:
        known = _leaves(group)
        for error in known:
            if isinstance(error, CairnError):
                raise error from None
        raise


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
