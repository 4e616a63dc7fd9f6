"""Replicas: several engines of one model behind one client. No torch here."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cairn.engine.client import EngineClient
from cairn.engine.messages import Ready
from cairn.engine.routing import Balance, Router
from cairn.engine.submission import Submission
from cairn.errors import CairnError, EngineDead
from cairn.obs.log import get_logger
from cairn.runner.media import PromptMedia
from cairn.types import KvTransferParams, SamplingParams

log = get_logger(__name__)

STARTS_ALLOWED = 3
STARTS_SECONDS = 600.0
"""A replica that ended is restarted at most STARTS times within this many seconds; then it is given
up."""
PAUSE_SECONDS = 1.0
"""Pause before a restart, in which the device frees the memory of the ended process."""
LAST_WORDS_SECONDS = 2.0
COME_AGAIN_SECONDS = 5
"""Retry-After of responses while no replica serves."""
SEED_BITS = 64


@dataclass(eq=False)
class Replica:
    """A replica: a place for an engine, which may be restarted.

    Attributes:
        client: the current engine.
        ended: why the last one ended; None while one serves.
        lost: it will not be restarted.
        starts: times of its restarts, newest last.
    """

    client: EngineClient
    ended: EngineDead | None = None
    lost: bool = False
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS_ALLOWED))

    @property
    def down(self) -> EngineDead | None:
        """Why it does not serve; None: it serves, or has not started yet."""
        return self.client.dead or self.ended

    def may_start(self) -> bool:
        """Whether it may be restarted."""
        old = time.monotonic() - STARTS_SECONDS
        return len(self.starts) < STARTS_ALLOWED or self.starts[0] < old


class Fleet:
    """Replicas, with the interface of one EngineClient.

    Every prompt goes to one replica with all its continuations, see `Router`. Requests without a
    seed get the one that a single engine would give them, so the choice of a replica does not
    change tokens. A replica that ends fails its own requests and is restarted.

    Args:
        make: creates an engine, not started yet, for a replica index.
        replicas: number of replicas, at least 2.
        balance: the routing policy, see `Router`.
        seed: base of the seeds, EngineOptions.seed.
        meeting: a temporary folder with the rendezvous file of replicas that share experts; these
            end together and are not restarted. None: each replica has all experts.

    Attributes:
        info: what the engines are, after `start`; max_model_len is the smallest of all.
        phases: seconds of the start-up by phase, of the slowest replica.
    """

    info: Ready

    def __init__(
        self,
        make: Callable[[int], EngineClient],
        replicas: int,
        balance: Balance,
        seed: int,
        meeting: Path | None = None,
    ) -> None:
        self.phases: dict[str, float] = {}
        self._make = make
        self._balance, self._meeting = balance, meeting
        self._seed = seed << 32
        self._replicas = [Replica(make(number)) for number in range(replicas)]
        self._router: Router | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._bound = 0
        self._passed: dict[str, int] = {}

    async def start(self, on_phase: Callable[[str, float], object] | None = None) -> None:
        """Start all replicas at the same time and wait until they serve.

        Args:
            on_phase: called with the name and the seconds of every phase that all have ended.

        Raises:
            BadModel, BadConfig, OutOfMemory, EngineDead: the error of the first replica that fails;
                the others are ended.
        """
        told = partial(self._phase_ended, on_phase)
        starting = [asyncio.create_task(engine.start(told)) for engine in self.engines]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop(0.0)
            raise
        infos = [engine.info for engine in self.engines]
        shortest = min(info.max_model_len for info in infos)
        self.info = info = msgspec.structs.replace(infos[0], max_model_len=shortest)
        self._bound = sum(engine.load[1] for engine in self.engines)
        pages = [info.num_pages for info in infos]
        self._router = Router(self._balance, info.page_size - info.landmarks, pages)
        self._keepers = [asyncio.create_task(self._keep(i)) for i in range(len(infos))]

    @property
    def engines(self) -> tuple[EngineClient, ...]:
        """The client of each replica, including ended and starting ones."""
        return tuple(replica.client for replica in self._replicas)

    @property
    def down(self) -> dict[int, EngineDead]:
        """Replicas that do not serve, by number, with the reason."""
        reasons = {number: replica.down for number, replica in enumerate(self._replicas)}
        return {number: reason for number, reason in reasons.items() if reason is not None}

    @property
    def dead(self) -> EngineDead | None:
        """Why no replica serves; None: one serves, or none has started yet."""
        down = self.down
        if len(down) < len(self._replicas):
            return None
        told = "; ".join(reason.message for reason in down.values())
        if self._over.is_set():
            return EngineDead(f"no replica is left ({told})")
        hint = f"Try again in {COME_AGAIN_SECONDS} s"
        return EngineDead(f"no replica serves now ({told})", hint, COME_AGAIN_SECONDS)

    @property
    def step_age(self) -> float:
        """The smallest `step_age` of all replicas."""
        return min((e.step_age for e in self.engines if e.serving), default=0.0)

    @property
    def load(self) -> tuple[int, int]:
        """Continuations that all replicas hold, and the most that they may hold."""
        return sum(engine.load[0] for engine in self.engines), self._bound

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        request_id: str | None = None,
        media: PromptMedia | None = None,
        transfer: KvTransferParams | None = None,
    ) -> Submission:
        """Have a prompt served by one replica, as `EngineClient.submit` does.

        Raises:
            BadRequest, TooLong: this can never be served.
            Busy: no replica has room.
            EngineDead: no replica serves.
        """
        serving = {i: engine for i, engine in enumerate(self.engines) if engine.serving}
        if self._router is None:
            raise EngineDead("the engine is not ready yet", "Try again when it has started")
        drawn = self._seed & ((1 << SEED_BITS) - 1)
        seeded = params if params.seed is not None else replace(params, seed=drawn)
        keys = self._router.keys(prompt, media.marks if media is not None else ())
        while serving:
            loads = {i: engine.load for i, engine in serving.items()}
            fitting = [i for i, (live, bound) in loads.items() if live + params.n <= bound]
            # If none has room, the chosen one raises Busy.
            chosen = self._router.choose(keys, {i: loads[i][0] for i in fitting or loads})
            try:
                submission = serving[chosen].submit(
                    prompt, seeded, priority, request_id, media, transfer
                )
            except EngineDead:
                # It has just ended, and its watchdog has not noticed yet.
                del serving[chosen]
                continue
            self._router.note(chosen, keys)
            self._seed += params.n
            return submission
        raise self.dead or EngineDead("no replica serves now", None, COME_AGAIN_SECONDS)

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """`EngineClient.call` on all serving replicas; their answers by replica index.

        Raises the errors of `EngineClient.call`.
        """
        serving = {str(i): engine for i, engine in enumerate(self.engines) if engine.serving}
        if not serving:
            raise self.dead or EngineDead("no replica serves now")
        answers = await asyncio.gather(
            *(engine.call(method, **arguments) for engine in serving.values())
        )
        if method == "flush_cache" and self._router is not None:
            for number in serving:
                self._router.forget(int(number))
        return dict(zip(serving, answers, strict=True))

    async def died(self) -> EngineDead:
        """Wait until no replica is left; returns why."""
        await self._over.wait()
        assert self.dead is not None
        return self.dead

    async def stop(self, timeout: float) -> None:
        """End all replicas, each as `EngineClient.stop` does."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(engine.stop(timeout) for engine in self.engines))
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)

    async def _keep(self, number: int) -> None:
        """Restart the replica whenever it ends, as often as allowed."""
        assert self._router is not None
        replica = self._replicas[number]
        serves = True
        while serves:
            replica.ended = await replica.client.died()
            self._router.forget(number)
            # The old process must be gone, so that the device is free.
            await replica.client.stop(LAST_WORDS_SECONDS)
            serves = self._meeting is None and await self._start_again(number, replica)
        log.error("replica %d is given up", number)
        replica.lost = True
        if all(each.lost for each in self._replicas):
            self._over.set()

    async def _start_again(self, number: int, replica: Replica) -> bool:
        """Try to restart it as often as allowed; returns whether it serves."""
        while replica.may_start():
            await asyncio.sleep(PAUSE_SECONDS)
            replica.starts.append(time.monotonic())
            log.warning("replica %d is started again", number)
            replica.client = self._make(number)
            try:
                await replica.client.start()
            except CairnError as error:
                log.error("replica %d does not start: %s", number, error)
            else:
                log.warning("replica %d serves again", number)
                replica.ended = None
                return True
        return False

    def _phase_ended(
        self, on_phase: Callable[[str, float], object] | None, name: str, seconds: float
    ) -> None:
        self.phases[name] = max(seconds, self.phases.get(name, 0.0))
        self._passed[name] = self._passed.get(name, 0) + 1
        if on_phase is not None and self._passed[name] == len(self._replicas):
            on_phase(name, self.phases[name])


Engine = EngineClient | Fleet
"""The engines that a server can use."""
