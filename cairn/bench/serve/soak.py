"""`cairn bench soak`: a mixed load for a long time, while the server's processes are watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cairn.bench.serve.client import Server, ServerAddress
from cairn.bench.serve.exchange import Outcome
from cairn.bench.serve.lengths import open_lengths
from cairn.bench.serve.load import Leavers, Pace, drive, every
from cairn.bench.serve.mix import Mix, open_mix
from cairn.bench.serve.processes import process_tree
from cairn.bench.serve.progress import progress_bar
from cairn.bench.serve.soak_report import GAUGES, Sample, SoakResult, Tally
from cairn.errors import BadConfig

WARMUP_REQUESTS = 20
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Options of a soak.

    Attributes:
        address: of the server.
        duration: seconds of load.
        pid: the server's parent process; its descendants are found; None watches none.
        max_concurrency: requests in flight.
        rate: requests per second; inf keeps `max_concurrency` in flight.
        long_len: tokens of the longest prompts.
        abort_fraction: share of the clients that leave at a random moment.
        interval: seconds between two samples.
        warmup: seconds that the slopes leave out; None: a sixth of the duration.
        settle: seconds of idleness before the samples at rest: servers close idle connections
            after about 5.
        seed: of requests, arrivals and aborts.
        tokenizer: folder that counts tokens; None: the server does.
    """

    address: ServerAddress
    duration: float = 3600.0
    pid: int | None = None
    max_concurrency: int = 8
    rate: float = float("inf")
    long_len: int = 8192
    abort_fraction: float = 0.1
    interval: float = 10.0
    warmup: float | None = None
    settle: float = 8.0
    seed: int = 0
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.abort_fraction <= 1.0:
            raise BadConfig(f"the abort fraction must be in [0, 1], not {self.abort_fraction}")
        if not 0.0 < self.interval < self.duration:
            raise BadConfig(f"the interval {self.interval:g} s must be in (0, duration)")
        if not 0.0 <= self.from_second < self.duration:
            raise BadConfig(f"the warm-up {self.warmup} s must be in [0, duration)")

    @property
    def from_second(self) -> float:
        """Seconds after which samples count."""
        return self.duration / 6 if self.warmup is None else self.warmup


async def run_soak(plan: SoakPlan) -> SoakResult:
    """Run the mix for the planned time and watch the server.

    Raises:
        BadConfig: no server, no such process, or no way to tell lengths.
    """
    if plan.pid is not None and not process_tree(plan.pid):
        raise BadConfig(f"there is no process {plan.pid}", "Give --pid of the running server")
    async with Server(plan.address) as server:
        lengths = replace(await open_lengths(server, plan.tokenizer), exact=False)
        soak = _Soak(plan, server, await open_mix(lengths, plan.long_len, plan.seed))
        # Warm up, so that descriptors that the server opens once are open before the first sample.
        await drive(Pace(count=WARMUP_REQUESTS, max_concurrency=plan.max_concurrency), soak.work)
        soak.tally = Tally()
        rest_before = await _at_rest(plan, server, 0.0)
        seconds = await soak.run()
        rest_after = await _at_rest(plan, server, seconds)
        return SoakResult(
            model=server.model,
            warmup=plan.from_second,
            seconds=seconds,
            tally=soak.tally,
            samples=soak.samples,
            rest_before=rest_before,
            rest_after=rest_after,
            ended=soak.over.is_set(),
        )


class _Soak:
    """The load, and sampling of the server meanwhile."""

    def __init__(self, plan: SoakPlan, server: Server, mix: Mix) -> None:
        self.plan, self.server, self.mix = plan, server, mix
        self.tally, self.samples = Tally(), list[Sample]()
        self.over = asyncio.Event()
        self._leavers = Leavers(plan.abort_fraction, plan.seed)
        self._began = time.perf_counter()

    async def run(self) -> float:
        """Send the mix until its time is over or the server has ended; seconds that it took."""
        plan = self.plan
        pace = Pace(plan.rate, 1.0, plan.max_concurrency, None, plan.duration, plan.seed)
        self._began = time.perf_counter()
        async with (
            every(plan.interval, self._look),
            progress_bar("seconds", plan.duration, self._view),
        ):
            await _first_of(drive(pace, self.work), self.over)
        return self._seconds

    async def work(self, index: int, due: float) -> None:
        """One request of the mix."""
        request = await self.mix.request(index)
        leave = self._leavers.leave_after(request.kind)
        outcome = await self.server.send(request, Outcome(due=due), leave)
        self._leavers.learn(outcome, leave)
        self.tally.add(outcome)
        if outcome.error is not None:
            # Wait after a refusal, so that requests are not sent in a tight loop.
            await asyncio.sleep(PAUSE_SECONDS)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    async def _look(self) -> None:
        self.samples.append(await _sample(self.plan, self.server, self._seconds))
        if self.plan.pid is not None and not self.samples[-1].processes:
            self.over.set()

    def _view(self) -> tuple[float, str]:
        failed = sum(self.tally.errors.values())
        note = f"{sum(self.tally.completed.values()):,} completed"
        return self._seconds, note + (f", {failed:,} failed" if failed else "")


async def _sample(plan: SoakPlan, server: Server, at: float) -> Sample:
    # Reading /proc does not block for long; the gauges are asked for last, so that the connection
    # for them is not among the descriptors of a server at rest.
    states = [] if plan.pid is None else process_tree(plan.pid)
    metrics = await server.metrics()
    gauges = {name: metrics[metric] for name, metric in GAUGES.items() if metric in metrics}
    return Sample(at, {state.pid: state for state in states}, gauges)


async def _at_rest(plan: SoakPlan, server: Server, at: float) -> Sample:
    """A sample of the idle server: every connection closed, and time for it to notice."""
    await server.close()
    await asyncio.sleep(plan.settle)
    server.open()
    return await _sample(plan, server, at)


async def _first_of(load: Coroutine[Any, Any, None], over: asyncio.Event) -> None:
    """Run the load until it ends or the event is set."""
    tasks = {asyncio.create_task(load), asyncio.create_task(_wait(over))}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
