"""Failures and misbehaving clients, each on a real server with the embedded model."""

import asyncio
import json
import random
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.running import Running, Stream, message, running, stopped

SLACK = 20.0
"""Seconds that an operation may take on a busy machine."""


IDLE_SECONDS = 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests that must not harm it, with few rows and a short queue. At the end
    it is shut down while it responds."""
    folder = tmp_path_factory.mktemp("server")
    with running(folder, "--max-num-seqs", "16", "--max-waiting", "240") as started:
        yield started
        check_shutdown(started)


def settled(server):
    """The ledger when nothing runs; fails if pages are missing."""

    def ledger():
        found = server.ledger()
        return found if found["owned"] == 0 and found["leases"] == 0 else None

    return server.wait_for(ledger, SLACK)


def metric(server, name):
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"cairn:{name}{{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def check_healthy(server, engine):
    """The same engine serves, and every page is free or cached."""
    assert server.engine.pid == engine
    ledger = settled(server)
    assert ledger["problems"] == [] and ledger["leaked"] == []
    assert ledger["free"] + ledger["cached"] == ledger["num_pages"]
    assert server.complete().status_code == 200
    server.wait_for(lambda: metric(server, "num_requests_running") == 0, SLACK)
    assert metric(server, "num_requests_waiting") == 0
    assert metric(server, "leaked_pages") == 0
    assert "ERROR" not in server.err.read_text()


async def restless_clients(url, count, seed):
    """Half of `count` clients stay to the end, the others disconnect at random moments."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(128)
    kept = []

    async def one(number):
        async with gate:
            tokens = rng.randrange(1, 12)
            prompt = "a" * rng.randrange(1, 150) + str(number)
            stream = Stream(url, prompt=prompt, max_tokens=tokens, stream=rng.random() < 0.7)
            await stream.open()
            if number % 2:
                await asyncio.sleep(rng.random() ** 3)
                stream.break_off()
            else:
                await asyncio.wait_for(finish(stream), 120)
                kept.append(stream)

    await asyncio.gather(*map(one, range(count)))
    return kept


async def finish(stream):
    """Read a whole response, streamed or not."""
    while not stream.ended:
        if not await stream._read():
            break
        head, _, body = stream.text.partition("\r\n\r\n")
        if "content-length: " in head:
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            if len(body.encode()) >= length:
                break
    stream.writer.close()


@pytest.mark.parametrize(
    "count", [60, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_clients_that_leave_at_random_moments(server, count):
    engine = server.engine.pid
    kept = asyncio.run(restless_clients(server.url, count, seed=count))
    assert len(kept) == count // 2
    assert {stream.status for stream in kept} == {200}
    check_healthy(server, engine)
    shown = server.get("/metrics").text
    assert "cairn:num_aborts_total{" in shown
    assert 'finished_reason="length"' in shown
    assert metric(server, "e2e_request_latency_seconds_count") >= count // 2


def test_a_prompt_that_can_never_fit(server):
    response = server.complete("x" * 9000)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "9000" in error["message"] and "8191" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_a_full_queue(server):
    engine = server.engine.pid

    async def crowd():
        streams = [await Stream(server.url, max_tokens=400, n=64).open() for _ in range(4)]
        await asyncio.to_thread(
            server.wait_for, lambda: metric(server, "num_requests_waiting") == 240, SLACK
        )
        late = server.complete(n=1)
        for stream in streams:
            stream.break_off()
        return late

    late = asyncio.run(crowd())
    assert late.status_code == 429
    assert 1 <= int(late.headers["retry-after"]) <= 60
    assert "256" in late.json()["error"]["message"]
    check_healthy(server, engine)


def test_requests_that_are_no_requests(server):
    engine = server.engine.pid
    address = server.url.removeprefix("http://").split(":")

    async def answer(data):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(data)
        first = await asyncio.wait_for(reader.read(100), 10)
        writer.transport.abort()
        return int(first.split(b" ")[1])

    heads = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    many = b"".join(b"x-%d: 1\r\n" % i for i in range(10_000))
    chunked = message({}).split(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    deep = b"[" * 100_000

    async def run():
        assert await answer(b"\x16\x03\x01\x02 hello\r\n\r\n") == 400
        assert await answer(heads + many + b"\r\n") in (400, 431)
        assert await answer(heads + b"x: " + b"y" * 200_000 + b"\r\n\r\n") in (400, 431)
        assert (
            await answer(heads + b"".join(b"x-%d: 1\r\n" % i for i in range(200)) + b"\r\n") == 431
        )
        assert await answer(chunked + b"%x\r\n" % len(deep) + deep + b"\r\n0\r\n\r\n") == 400
        assert await answer(message({}).replace(b"Length: 2", b"Length: 99999999999")) == 413
        endless = b"".join(b"%x\r\n" % (1 << 20) + b"x" * (1 << 20) + b"\r\n" for _ in range(17))
        assert await answer(chunked + endless) == 413

    asyncio.run(run())
    check_healthy(server, engine)


@pytest.mark.parametrize("seconds", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_the_api_process_stopped_and_continued(server, seconds):
    engine = server.engine.pid

    async def run():
        asked = {"max_tokens": 150, "stream_options": {"include_usage": True}}
        streams = [await Stream(server.url, **asked).begin() for _ in range(4)]
        stopped(server.process.pid, seconds)
        return [await stream.finish() for stream in streams]

    texts = asyncio.run(run())
    assert all("data: [DONE]" in text and '"completion_tokens":150' in text for text in texts)
    assert all(len(pieces(text).encode()) >= 150 for text in texts)
    check_healthy(server, engine)


def pieces(text):
    """The text of a stream's events."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for e in events for choice in json.loads(e)["choices"])


def test_an_idle_server_rests(server):
    settled(server)
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    time.sleep(1)
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(IDLE_SECONDS)
    used = sum(sum(process.cpu_times()[:2]) for process in processes) - before
    assert used / IDLE_SECONDS < 0.02


def test_the_api_process_holds_no_torch(server):
    assert server.complete().status_code == 200
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{server.engine.pid}/maps").read_text()


def test_descriptors_are_given_back(server):
    process = psutil.Process(server.process.pid)
    server.complete()
    before = process.num_fds()
    for _ in range(20):
        httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
    server.wait_for(lambda: process.num_fds() <= before + 1, SLACK)


RANKS = ("-tp", "2", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGKILL, ()), (signal.SIGSTOP, ()), (signal.SIGKILL, RANKS)]
)
def test_an_engine_or_a_rank_that_is_killed_or_stopped(tmp_path, number, ranks):
    with running(tmp_path, *ranks) as server:
        late = []

        async def keep_asking():
            """What becomes of requests that are sent until the server is gone."""
            while server.process.poll() is None:
                try:
                    late.append(await Stream(server.url, stream=False, max_tokens=8000).open())
                except ConnectionRefusedError:
                    break
                await asyncio.sleep(0.05)

        async def run():
            streams = [await Stream(server.url, max_tokens=4000).begin() for _ in range(3)]
            plain = asyncio.create_task(asyncio.to_thread(server.complete, max_tokens=4000))
            await asyncio.to_thread(
                server.wait_for, lambda: metric(server, "num_requests_running") == 4, SLACK
            )
            engine = server.engine
            hurt = engine.children()[0] if ranks else engine
            hurt.send_signal(number)
            began = time.monotonic()
            asking = asyncio.create_task(keep_asking())
            texts = [await stream.finish() for stream in streams]
            code = await asyncio.to_thread(server.wait_end)
            seconds = time.monotonic() - began
            await asking
            return texts, await plain, code, seconds, engine, [await x.finish() for x in late]

        texts, plain, code, seconds, engine, later = asyncio.run(run())
        assert code == 1
        assert seconds < 5 + SLACK
        word = "killed by SIGKILL" if number == signal.SIGKILL else "no sign of life"
        word = f"rank 1 (cpu) was {word}" if ranks else word
        assert later and all(" 503 " in text.splitlines()[0] and word in text for text in later)
        for text in texts:
            last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
            assert word in json.loads(last[6:])["error"]["message"]
        assert plain.status_code == 503
        assert word in plain.json()["error"]["message"]
        lines = [line for line in server.err.read_text().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and word in lines[0]
        assert "Traceback" not in server.err.read_text()
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def check_shutdown(server):
    """Streams finish, new requests get an error with the reason."""

    async def run():
        opened = [Stream(server.url, max_tokens=24).begin() for _ in range(15)]
        streams = await asyncio.gather(*opened)
        server.signal(signal.SIGTERM)
        server.wait_for(lambda: server.get("/ready").status_code == 503, SLACK)
        late = server.complete()
        alive = server.get("/health")
        texts = await asyncio.gather(*(stream.finish() for stream in streams))
        return late, alive, texts

    late, alive, texts = asyncio.run(run())
    assert late.status_code == 503
    assert "shutting down" in late.json()["error"]["message"]
    assert alive.status_code == 200
    assert all("data: [DONE]" in text and '"length"' in text for text in texts)
    assert all(len(pieces(text).encode()) >= 24 for text in texts)
    assert server.wait_end() == 0
    lines = server.err.read_text().splitlines()
    assert not any(line.startswith("error: ") or "ERROR" in line for line in lines)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path):
    with running(tmp_path) as server:
        engine = server.engine

        async def run():
            stream = await Stream(server.url, max_tokens=8000).begin()
            server.signal(signal.SIGTERM)
            server.wait_for(lambda: "1 running requests have 30 s" in server.out.read_text(), SLACK)
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            code = await asyncio.to_thread(server.wait_end)
            return stream, code, time.monotonic() - began

        _, code, seconds = asyncio.run(run())
        assert code == 128 + signal.SIGTERM
        assert seconds < SLACK
        engine.wait(SLACK)


@pytest.mark.slow
def test_streams_that_exceed_the_shutdown_timeout_are_cut(tmp_path):
    with running(tmp_path, "--shutdown-timeout", "1") as server:

        async def run():
            stream = await Stream(server.url, max_tokens=8000).begin()
            server.signal(signal.SIGTERM)
            return await stream.finish()

        text = asyncio.run(run())
        assert "[DONE]" not in text and '"error"' in text
        assert server.wait_end() == 1
        assert "1 requests were cut off" in server.out.read_text()


def check_nothing_outlives(server):
    """Kill the API process while a request runs: all of its child processes end."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert server.engine in family
    asyncio.run(Stream(server.url, max_tokens=4000).begin())
    server.signal(signal.SIGKILL)
    server.wait_end()
    assert psutil.wait_procs(family, SLACK)[1] == []


@pytest.mark.slow
def test_not_ready_while_loading_and_while_a_step_takes_long(tmp_path):
    faults = {"CAIRN_FAULT": "stall:4@8", "CAIRN_ALLOW_FAULTS": "1"}
    server = Running(tmp_path, "--ready-step-age", "1", "--admin-port", "0", **faults)
    try:
        loading = server.get("/ready")
        assert loading.status_code == 503 and "loading" in loading.json()["reason"]
        assert server.get("/health").status_code == 200
        assert server.complete().status_code == 503
        server.wait_ready()

        async def run():
            stream = await Stream(server.url, max_tokens=12).begin()
            reason = server.wait_for(
                lambda: "step" in server.get("/ready").json().get("reason", ""), SLACK
            )
            alive = server.get("/health").status_code
            return reason, alive, await stream.finish()

        reason, alive, text = asyncio.run(run())
        assert reason and alive == 200 and "data: [DONE]" in text
        server.wait_for(lambda: server.get("/ready").status_code == 200, SLACK)
        check_nothing_outlives(server)
    finally:
        server.close()
