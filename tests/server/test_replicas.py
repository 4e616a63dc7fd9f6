"""Two real engines with one API, called in this process."""

import asyncio
import json
import os
import signal
from dataclasses import replace

import httpx
import psutil
import pytest

from cairn.config import EngineOptions
from cairn.obs.trace import Tracer
from cairn.server.admin import create_admin_app
from cairn.server.app import create_app
from cairn.server.loading import close, load, new_state
from cairn.server.middleware import wrap
from cairn.server.options import ServerOptions
from cairn.types import Grammar, SamplingParams
from tests.engine.children import MODEL, OPTIONS, collect, gone, until

PAGE_TOKENS = 63
START_SECONDS = 200.0
"""Seconds that a replica may take on a busy machine."""
SERVER = ServerOptions(data_parallel_size=2, max_waiting=101)
LONG = SamplingParams(max_tokens=100_000, ignore_eos=True)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def served(runner):
    """The state of a server with two replicas."""
    engine = EngineOptions(**{**OPTIONS, "kv_cache_memory": "64MiB"}, seed=3)
    state = new_state(MODEL, engine, SERVER, Tracer(None))
    phases = []
    runner.run(load(state, MODEL, lambda name, seconds: phases.append(name)))
    assert phases == ["import", "weights", "pages", "tokenizer", "warmup"]
    state.loaded = True
    yield state
    pids = [engine.pid for engine in state.client.engines]
    runner.run(state.client.stop(30))
    close(state)
    assert all(map(gone, pids))


@pytest.fixture
def state(served, runner):
    """After the test both replicas serve, have no requests and account for every page."""
    yield served
    client = served.client
    runner.run(until(lambda: not client.down and client.load == (0, 2 * 16 + 101)))
    for ledger in runner.run(client.call("cache")).values():
        assert ledger["problems"] == [] and ledger["owned"] == ledger["leases"] == 0


async def asked(app, method, path, **arguments):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request(method, path, **arguments)


def lived(state):
    """Processes of the replicas by index."""
    return {i: engine.pid for i, engine in enumerate(state.client.engines)}


JOBS = [
    ("The stones mark", {"temperature": 0, "max_tokens": 8}),
    ("Once more", {"seed": 5, "max_tokens": 8, "n": 2}),
    ("Without a seed", {"max_tokens": 8, "n": 2}),
    ("Again without", {"max_tokens": 8}),
    ("Digits", {"seed": 1, "max_tokens": 4, "grammar": Grammar("regex", "[0-9]+")}),
]
SEEDS = {2: (3 << 32) + 3, 3: (3 << 32) + 5}
"""The output of a single engine with seed 3 for requests without a seed."""


def test_tokens_are_those_of_one_engine_whichever_serves(state, runner):
    async def tokens(client, jobs):
        submitted = [(client.submit([*text.encode()], p), p.n) for text, p in jobs]
        loads = [engine.load for engine in state.client.engines]
        found = await asyncio.gather(*(collect(*each) for each in submitted))
        return loads, [[output.token_ids for output in outputs] for outputs in found]

    jobs = [(text, SamplingParams(**fields)) for text, fields in JOBS]
    loads, found = runner.run(tokens(state.client, jobs))
    assert loads == [(4, 16 + 50), (3, 16 + 51)]
    seeded = [
        (text, replace(params, seed=SEEDS.get(i, params.seed)))
        for i, (text, params) in enumerate(jobs)
    ]
    loads, expected = runner.run(tokens(state.client.engines[0], seeded))
    assert loads[0][0] == 7 and found == expected


def test_a_prompt_goes_where_its_prefix_is(state, runner):
    words = [*("cairns " * 20).encode()]

    async def cached(ids):
        (output,) = await collect(state.client.submit(ids, SamplingParams(max_tokens=1)))
        return output.deltas[0].cached_tokens

    async def run():
        begins = [[first, *words] for first in range(2)]
        cold = [await cached(ids) for ids in begins]
        warm = [await cached([*ids, 1, 2]) for ids in reversed(begins)]
        await asked(admin(state), "POST", "/admin/flush_cache")
        return cold, warm, await cached(begins[0])

    assert runner.run(run()) == ([0] * 2, [2 * PAGE_TOKENS] * 2, 0)


def admin(state):
    return wrap(create_admin_app(state), state)


def test_operators_see_each_replica(state, runner):
    async def run():
        api = create_app(state)
        one = SamplingParams(max_tokens=1)
        await asyncio.gather(*(collect(state.client.submit([1], one)) for _ in range(2)))
        await until(lambda: all(engine.stats.steps for engine in state.client.engines))
        metrics = (await asked(api, "GET", "/metrics")).text
        ledgers = (await asked(admin(state), "GET", "/admin/cache")).json()
        return metrics, ledgers, await asked(api, "GET", "/ready")

    metrics, ledgers, ready = runner.run(run())
    for number in "01":
        labels = f'{{model_name="{MODEL.name}",replica="{number}"}}'
        assert f"cairn:replica_up{labels} 1.0" in metrics
        assert f"cairn:pages_total{labels} {ledgers[number]['num_pages']}.0" in metrics
    assert ready.status_code == 200


def test_a_killed_replica_fails_its_own_requests_and_comes_back(state, runner):
    async def stream(api):
        body = {"prompt": "abc", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        return (await asked(api, "POST", "/v1/completions", json=body)).text

    async def run():
        api, client = create_app(state), state.client
        before = lived(state)
        kept = client.submit([1], LONG)
        streams = [asyncio.create_task(stream(api))]
        await until(lambda: client.load[0] == 2)
        assert [engine.load[0] for engine in client.engines] == [1, 1]
        first = await anext(kept)
        assert first.token_ids
        [number] = [i for i, e in enumerate(client.engines) if kept._client is not e]
        await until(lambda: client.engines[number].stats.running == 1)
        os.kill(before[number], signal.SIGKILL)
        await until(lambda: client.down)
        health = await asked(api, "GET", "/health")
        assert health.status_code == 200 and [*health.json()["replicas_down"]] == [str(number)]
        reason = health.json()["replicas_down"][str(number)]
        assert reason.startswith(f"replica {number}: the engine process ")
        metrics = (await asked(api, "GET", "/metrics")).text
        assert f'replica_up{{model_name="{MODEL.name}",replica="{number}"}} 0.0' in metrics
        (text,) = await asyncio.gather(*streams)
        error = json.loads(text.rsplit("data: ", 1)[1])["error"]
        assert reason in error["message"] and "Send the request again" in error["message"]
        answer = await asked(api, "POST", "/v1/completions", json={"prompt": "b", "max_tokens": 2})
        assert answer.status_code == 200 and (await anext(kept)).token_ids
        kept.cancel()
        await until(lambda: not client.down, START_SECONDS)
        after = lived(state)
        assert gone(before[number]) and not gone(after[number])
        assert after[1 - number] == before[1 - number]
        taken = [client.submit([i, 1], SamplingParams(max_tokens=1)) for i in range(2)]
        assert [engine.load[0] for engine in client.engines] == [1, 1]
        await asyncio.gather(*map(collect, taken))

    runner.run(run())
    own = {p.pid for p in psutil.Process().children() if "cairn.engine.process" in p.cmdline()}
    assert own == {*lived(state).values()}
