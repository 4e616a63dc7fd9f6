"""The client with a real engine process."""

import asyncio
import os
import random
from itertools import chain
from pathlib import Path

import psutil
import pytest

from cairn import LLM
from cairn.engine.messages import FROM_ENGINE, TO_ENGINE, Stats
from cairn.errors import BadRequest, Busy, EngineDead, TooLong
from cairn.types import SamplingParams
from tests.engine.children import MODEL, OPTIONS, collect, gone, make_client, until

WAITING = 240
BOUND = 16 + WAITING


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(runner):
    client = make_client(max_waiting=WAITING)
    phases = []
    runner.run(client.start(lambda name, seconds: phases.append((name, seconds))))
    assert [name for name, _ in phases] == ["import", "weights", "pages", "tokenizer", "warmup"]
    assert client.phases == dict(phases)
    yield client
    runner.run(check_stop(client))


async def check_stop(client):
    """Stopping ends the process and the running requests."""
    submission = client.submit([1], SamplingParams(max_tokens=100_000, ignore_eos=True))
    await anext(submission)
    assert os.getsid(client.pid) == client.pid
    await client.stop(30)
    assert gone(client.pid)
    with pytest.raises(EngineDead, match="the engine was stopped"):
        await collect(submission)
    assert str(await client.died()) == "the engine was stopped"
    await client.stop(30)


@pytest.fixture
def client(shared, runner):
    """The engine. After the test it holds no request, and every page is accounted for."""
    yield shared
    runner.run(until(lambda: shared.load == (0, BOUND)))
    ledger = runner.run(shared.call("cache"))
    assert ledger["problems"] == []
    assert ledger["owned"] == ledger["leases"] == 0
    assert ledger["free"] + ledger["evictable"] == ledger["num_pages"]


@pytest.fixture(scope="module")
def offline():
    return LLM(MODEL, **OPTIONS)


def prompt(text: str) -> list[int]:
    return list(text.encode())


def test_knows_the_engine(client, offline):
    info = client.info
    assert (info.vocab_size, info.page_size) == (256, offline.engine_config.page_size)
    assert info.max_model_len == offline.max_model_len
    assert info.selecting_layers == offline.spec.selecting_layers
    assert info.has_tokenizer and info.max_num_seqs == 16
    assert any(choice.startswith("page_size=") for choice in info.choices)
    assert {"weights", "pages"} <= dict(info.memory).keys()


JOBS = [
    ("The stones mark", {"temperature": 0, "max_tokens": 24}),
    ("Once more", {"temperature": 1.0, "seed": 5, "max_tokens": 40, "n": 3}),
    ("Count: ", {"temperature": 0.8, "seed": -3, "max_tokens": 30, "logprobs": 3}),
    ("A long " * 60, {"temperature": 0, "max_tokens": 5, "prompt_logprobs": 2}),
    ("The stones mark", {"temperature": 0, "max_tokens": 60, "stop": ("e", "zz")}),
    ("Ends by id", {"temperature": 0, "max_tokens": 60, "stop_token_ids": (32,)}),
    ("Read", {"temperature": 0, "max_tokens": 4, "selection": True}),
]


def test_streams_equal_the_offline_engine(client, offline, runner):
    expected = [
        offline.generate({"prompt_token_ids": prompt(text)}, SamplingParams(**params))[0]
        for text, params in JOBS
    ]

    async def run():
        await client.call("flush_cache")
        return await asyncio.gather(
            *(
                collect(client.submit(prompt(text), SamplingParams(**params)), params.get("n", 1))
                for text, params in JOBS
            )
        )

    for (text, params), want, got in zip(JOBS, expected, runner.run(run()), strict=True):
        assert len(got) == len(want.outputs), text
        for output, ours in zip(want.outputs, got, strict=True):
            assert ours.text == output.text, text
            assert ours.token_ids == output.token_ids, text
            assert ours.last.finish_reason == output.finish_reason, text
            assert ours.last.stop_reason == output.stop_reason, text
            assert all(d.finish_reason is None for d in ours.deltas[:-1])
            same_positions(ours.logprobs, output.logprobs or [])
            timing = ours.last.timing
            assert min(timing.queue, timing.prefill, timing.decode) >= 0 and timing.prefill > 0
            selection = [entry for delta in ours.deltas for entry in delta.selection]
            assert len(selection) == (len(ours.token_ids) if params.get("selection") else 0)
        first = got[0].deltas[0]
        assert first.cached_tokens is not None
        if want.prompt_logprobs is None:
            assert first.prompt_logprobs is None
        else:
            assert want.prompt_logprobs[0] is None
            same_positions([*chain(*first.prompt_logprobs)], want.prompt_logprobs[1:])


def same_positions(ours, theirs):
    assert len(ours) == len(theirs)
    for position, entry in zip(ours, theirs, strict=True):
        ids, values, ranks = entry.columns
        assert list(position.ids) == list(ids) and list(position.ranks) == list(ranks)
        assert position.values == pytest.approx(list(values), abs=1e-4)


def test_a_repeated_prompt_comes_from_the_cache(client, runner):
    async def run():
        ids = prompt("cairns " * 60)
        first = await collect(client.submit(ids, SamplingParams(max_tokens=2)))
        again = await collect(client.submit(ids, SamplingParams(max_tokens=2)))
        dropped = await client.call("flush_cache")
        last = await collect(client.submit(ids, SamplingParams(max_tokens=2)))
        return [out[0].deltas[0].cached_tokens for out in (first, again, last)], dropped

    cached, dropped = runner.run(run())
    whole_pages = 420 // (client.info.page_size - 1) * (client.info.page_size - 1)
    assert cached == [0, whole_pages, 0]
    assert dropped["pages"] >= 6


@pytest.mark.parametrize(
    ("ids", "params", "error", "message"),
    [
        ([0] * 10**6, {}, TooLong, "prompt has 1000000 tokens.* may have \\d+ "),
        ([], {}, BadRequest, "prompt is empty"),
        ([256], {}, BadRequest, "prompt token id 256 is out of range"),
        ([2**40], {}, BadRequest, "out of range"),
        ([1], {"n": BOUND + 1}, BadRequest, "n is 257, but this server holds 256 outputs"),
        ([1], {"stop": ("\ud83d",)}, BadRequest, "half of a surrogate pair"),
    ],
)
def test_refuses_at_arrival(client, runner, ids, params, error, message):
    async def run():
        client.submit(ids, SamplingParams(**params))

    with pytest.raises(error, match=message):
        runner.run(run())
    assert client.load == (0, BOUND)


def test_an_id_names_one_request_at_a_time(client, runner):
    async def run():
        with client.submit([1], SamplingParams(max_tokens=500), request_id="mine") as first:
            assert first.id == "mine"
            with pytest.raises(BadRequest, match="'mine' is in use"):
                client.submit([1], SamplingParams(), request_id="mine")
        await until(lambda: client.load[0] == 0)
        await collect(client.submit([1], SamplingParams(max_tokens=2), request_id="mine"))

    runner.run(run())


def test_cancelling_ends_the_iteration_and_gives_the_place_back(client, runner):
    async def run():
        long = SamplingParams(max_tokens=3000, ignore_eos=True, n=2)
        submission = client.submit(prompt("Go on"), long)
        seen = 0
        async for _ in submission:
            seen += 1
            if seen == 3:
                submission.cancel()
                submission.cancel()
        assert seen == 3
        await until(lambda: client.load[0] == 0)
        # One task waits for a delta while another one cancels the request.
        with client.submit(prompt("Go on"), long) as waited:
            reader = asyncio.create_task(collect(waited, 2))
            await asyncio.sleep(0.1)
            waited.cancel()
            await asyncio.wait_for(reader, 10)
        # A cancelled task leaves its block.
        reader = asyncio.create_task(collect(client.submit(prompt("Go on"), long), 2))
        await asyncio.sleep(0.1)
        assert client.load[0] > 0
        reader.cancel()
        await until(lambda: client.load[0] == 0)

    runner.run(run())


def test_full_is_busy_exactly_at_the_bound(client, runner):
    async def run():
        with client.submit(prompt("x"), SamplingParams(max_tokens=3000, n=BOUND - 1)) as most:
            last = client.submit(prompt("y"), SamplingParams(max_tokens=3000))
            with pytest.raises(Busy, match=f"{BOUND} outputs are running .* at most {BOUND}") as no:
                client.submit(prompt("z"), SamplingParams(max_tokens=1))
            assert 1 <= no.value.retry_after <= 60
            assert f"Try again in {no.value.retry_after} s" in str(no.value)
            last.cancel()
            # The slot is free only when the engine has confirmed it.
            with pytest.raises(Busy):
                client.submit(prompt("z"), SamplingParams(max_tokens=1))
            await until(lambda: client.load[0] == BOUND - 1)
            client.submit(prompt("z"), SamplingParams(max_tokens=3000)).cancel()
            most.cancel()

    runner.run(run())


def test_hundreds_of_requests_half_of_them_taken_back(client, runner):
    draw = random.Random(7)

    async def submitted(ids, params):
        while True:
            try:
                return client.submit(ids, params)
            except Busy:
                # Cancelled requests keep their slots until the engine has released them.
                assert client.load[0] == BOUND
                await asyncio.sleep(0.05)

    async def one(gate: asyncio.Semaphore) -> bool:
        length, give_up = draw.randrange(1, 5), draw.random() < 0.5
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        ids = [draw.randrange(256) for _ in range(draw.randrange(1, 12))]
        async with gate:
            with await submitted(ids, params) as stream:
                if give_up:
                    await asyncio.sleep(draw.random() * 0.2)
                    return False
                got = [delta async for delta in stream]
        assert got[-1].finish_reason == "length"
        assert sum(len(delta.token_ids) for delta in got) == length
        return True

    async def run() -> int:
        gate = asyncio.Semaphore(BOUND)
        return sum(await asyncio.gather(*(one(gate) for _ in range(320))))

    assert 120 < runner.run(run()) < 200


def test_stats_follow_the_engine(client, runner):
    async def run():
        await client.call("flush_cache")
        # The heartbeat after the next one is newer than this moment.
        for _ in range(2):
            last = client.stats
            await until(lambda last=last: client.stats is not last)
        before = client.stats
        ids = prompt("p" * 200)
        await collect(client.submit(ids, SamplingParams(max_tokens=7, ignore_eos=True)))
        await collect(client.submit(ids, SamplingParams(max_tokens=7, ignore_eos=True)))
        await until(lambda: client.stats.generated_tokens == before.generated_tokens + 14)
        return before, client.stats

    before, after = runner.run(run())
    assert after.prompt_tokens - before.prompt_tokens == 400
    assert after.prefix_queries - before.prefix_queries == 400
    cached = 200 // (client.info.page_size - 1) * (client.info.page_size - 1)
    assert after.prefix_hits - before.prefix_hits == cached
    assert after.steps - before.steps == 14
    assert after.model_seconds > before.model_seconds
    assert after.selecting_queries > before.selecting_queries
    assert after.pages_total == client.info.num_pages
    assert after.pages_leaked == after.running == after.waiting == 0


def test_calls(client, runner):
    async def run():
        with pytest.raises(BadRequest, match="no method 'dance'"):
            await client.call("dance")
        with pytest.raises(BadRequest, match="steps must be an integer in"):
            await client.call("profile", steps=0)
        profile = asyncio.create_task(client.call("profile", steps=3))
        await asyncio.sleep(0)
        with pytest.raises(BadRequest, match="a profile is being taken"):
            await client.call("profile", steps=3)
        await collect(client.submit(prompt("work"), SamplingParams(max_tokens=5, ignore_eos=True)))
        taken = await profile
        lagging = await client.call("profile", steps=3, seconds=0.2)
        return taken, lagging

    taken, lagging = runner.run(run())
    assert taken["steps"] == 3 and "Self CPU" in taken["table"]
    assert taken["trace"][:2] == b"\x1f\x8b"
    assert lagging["steps"] == 0


def test_the_sockets_have_no_names_while_serving(client):
    sockets = psutil.Process().net_connections("unix")
    folders = {Path(s.laddr).parent for s in sockets if s.laddr.endswith((TO_ENGINE, FROM_ENGINE))}
    assert folders
    assert not any(folder.exists() for folder in folders)


def test_an_idle_engine_and_its_client_rest(client, runner):
    engine, own = psutil.Process(client.pid), psutil.Process()

    async def run():
        await asyncio.sleep(1)
        before = engine.cpu_times(), own.cpu_times()
        await asyncio.sleep(2)
        after = engine.cpu_times(), own.cpu_times()
        return [b.user + b.system - a.user - a.system for a, b in zip(before, after, strict=True)]

    # A busy loop would use all of the 2 seconds.
    assert max(runner.run(run())) < 0.2


def test_nothing_works_before_the_start():
    async def run():
        client = make_client()
        assert client.load[0] == 0 and client.stats == Stats()
        with pytest.raises(EngineDead, match="not ready yet"):
            client.submit([1], SamplingParams())
        with pytest.raises(EngineDead, match="not ready yet"):
            await client.call("cache")
        await client.stop(1)

    asyncio.run(run())
