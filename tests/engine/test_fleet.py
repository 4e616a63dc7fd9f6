"""Replicas with fake engines; tests/server/test_replicas.py has real ones."""

import asyncio
from dataclasses import dataclass, field

import pytest

from cairn.engine import fleet as module
from cairn.engine.fleet import Fleet
from cairn.engine.messages import Ready
from cairn.errors import BadConfig, Busy, EngineDead, OutOfMemory
from cairn.types import SamplingParams

ROOM = 4


@dataclass
class Engine:
    """An engine that starts as configured and then accepts prompts."""

    number: int
    failure: Exception | None = None
    len: int = 1000
    live: int = 0
    dead: EngineDead | None = None
    serving: bool = False
    vanished: bool = False
    stopped: bool = False
    step_age: float = 0.0
    seeds: list = field(default_factory=list)

    def __post_init__(self):
        self._ended = asyncio.Event()

    async def start(self, on_phase=lambda name, seconds: None):
        await asyncio.sleep(0)
        if self.failure is not None:
            self.end(str(self.failure))
            raise self.failure
        on_phase("weights", 1.0 + self.number)
        self.info = Ready(256, self.len, (), 64, True, (0,), 100, 2, True, (), ())
        self.serving = True

    @property
    def load(self):
        return self.live, ROOM

    def submit(self, prompt, params, priority=0, request_id=None, media=None, transfer=None):
        if self.vanished:
            raise EngineDead("nobody is there")
        if self.live + params.n > ROOM:
            raise Busy("full", retry_after=3)
        self.seeds.append(params.seed)
        self.live += params.n
        return self.number

    async def call(self, method, **arguments):
        return method, self.number

    def end(self, reason):
        self.serving, self.live = False, 0
        self.dead = EngineDead(reason)
        self._ended.set()

    async def died(self):
        await self._ended.wait()
        return self.dead

    async def stop(self, timeout):
        self.stopped = True
        if self.dead is None:
            self.end("stopped")


class Fakes:
    """Creates engines; those after a replica's first one are in `later`."""

    def __init__(self, *first, later=()):
        self.first, self.later, self.made = first, list(later), []

    def __call__(self, number):
        fresh = self.later.pop(0) if len(self.made) >= len(self.first) else self.first[number]
        self.made.append(Engine(number, **fresh))
        return self.made[-1]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)


def running(test, *first, later=(), balance="auto", seed=0):
    """Run a test with a fleet that serves."""

    async def run():
        fakes = Fakes(*first, later=later)
        fleet = Fleet(fakes, len(first), balance, seed)
        phases = []
        await fleet.start(lambda name, seconds: phases.append((name, seconds)))
        assert phases == [("weights", float(len(first)))] and fleet.phases == dict(phases)
        await test(fleet, fakes)
        await fleet.stop(1)
        assert all(engine.stopped for engine in fleet.engines)

    asyncio.run(run())


async def turns():
    for _ in range(20):
        await asyncio.sleep(0)


def test_prompts_are_shared_out_and_seeds_are_those_of_one_engine():
    async def test(fleet, fakes):
        assert fleet.info.max_model_len == 500 and fleet.load == (0, 3 * ROOM)
        params = SamplingParams(n=2)
        assert [fleet.submit([1], params) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
        assert [engine.seeds for engine in fakes.made] == [
            *([(7 << 32), (7 << 32) + 6], [(7 << 32) + 2, (7 << 32) + 8]),
            [(7 << 32) + 4, (7 << 32) + 10],
        ]
        assert fleet.load == (12, 12)
        with pytest.raises(Busy):
            fleet.submit([1], SamplingParams())
        fakes.made[1].live = 0
        assert fleet.submit([1], SamplingParams(seed=5)) == 1 and fakes.made[1].seeds[-1] == 5
        assert await fleet.call("cache") == {str(i): ("cache", i) for i in range(3)}

    running(test, {}, {"len": 500}, {}, seed=7)


def test_a_prefix_is_sent_where_it_is_known_until_the_caches_are_flushed():
    async def test(fleet, fakes):
        long, one = [*range(200)], SamplingParams()
        assert [fleet.submit(ids, one) for ids in (long, [1], long[:150])] == [0, 1, 0]
        await fleet.call("flush_cache")
        assert fleet.submit(long, one) == 1

    running(test, {}, {})


def test_a_replica_that_ends_is_passed_over_and_comes_back():
    async def test(fleet, fakes):
        fakes.made[0].vanished = True
        assert fleet.submit([1], SamplingParams()) == 1
        fakes.made[0].end("killed")
        fakes.made[1].step_age = 3.0
        assert [why.message for why in fleet.down.values()] == ["killed"]
        assert fleet.dead is None and fleet.step_age == 3.0
        await turns()
        assert fakes.made[0].stopped and len(fakes.made) == 4
        assert fleet.down == {} and fleet.engines == (fakes.made[3], fakes.made[1])
        assert fleet.submit([1], SamplingParams()) == 0

    # The first restart fails.
    running(test, {}, {}, later=[{"failure": BadConfig("no socket")}, {}])


def test_replicas_are_given_up_and_with_the_last_one_the_fleet():
    async def test(fleet, fakes):
        for _ in range(4):
            fleet.engines[0].end("killed")
            await turns()
        assert (
            {*fleet.down} == {0} and fleet.dead is None and fleet.submit([1], SamplingParams()) == 1
        )
        died = asyncio.create_task(fleet.died())
        for i in range(4):
            fleet.engines[1].end("out of memory")
            if i == 0:
                with pytest.raises(EngineDead, match="no replica serves now .*Try again") as told:
                    fleet.submit([1], SamplingParams())
                assert told.value.retry_after and fleet.dead is not None
            await turns()
            assert died.done() == (i == 3)
        assert str(await died) == "no replica is left (killed; out of memory)"

    running(test, {}, {}, later=[{}] * 6)


def test_a_start_that_fails_ends_all():
    async def run():
        fakes = Fakes({}, {"failure": OutOfMemory("too small")})
        with pytest.raises(OutOfMemory, match="too small"):
            await Fleet(fakes, 2, "auto", 0).start()
        assert all(engine.stopped for engine in fakes.made)

    asyncio.run(run())
