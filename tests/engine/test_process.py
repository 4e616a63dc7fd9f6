"""Failures of the engine process."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cairn.engine.process import fatal_of
from cairn.errors import BadConfig, BadModel, EngineDead, InvariantError, OutOfMemory
from cairn.types import SamplingParams
from tests.engine.children import MODEL, collect, engine, gone, make_client, until

LONG = SamplingParams(max_tokens=100_000, ignore_eos=True)
STUCK = 3.0


@pytest.fixture(autouse=True)
def private_tmp(tmp_path_factory, monkeypatch):
    """Sockets are in a folder of the test with a short path; no file may remain there."""
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert not [*Path(folder).rglob("*")]


async def first_delta(submission):
    return await asyncio.wait_for(anext(submission), 30)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "killed by SIGKILL.*lower kv_cache_memory"),
        pytest.param(signal.SIGSTOP, "no sign of life for 3 seconds", marks=pytest.mark.slow),
    ],
)
def test_a_dead_or_stuck_engine_is_seen(number, reason):
    async def run():
        async with engine(stuck_seconds=STUCK) as client:
            # Signals to the process group are handled by the parent.
            os.kill(client.pid, signal.SIGTERM)
            os.kill(client.pid, signal.SIGINT)
            submissions = [client.submit([1], LONG) for _ in range(3)]
            for submission in submissions:
                await first_delta(submission)
            call = asyncio.create_task(client.call("profile", steps=200, seconds=300))
            await asyncio.sleep(0.1)
            assert client.dead is None
            os.kill(client.pid, number)
            dead = await asyncio.wait_for(client.died(), 30)
            with pytest.raises(EngineDead, match=reason):
                raise dead
            assert client.dead is dead
            for submission in submissions:
                with pytest.raises(EngineDead, match=reason):
                    await collect(submission)
                submission.cancel()
            with pytest.raises(EngineDead, match=reason):
                await call
            with pytest.raises(EngineDead, match=reason):
                client.submit([1], LONG)
            await until(lambda: gone(client.pid), 5)

    asyncio.run(run())


def test_an_engine_that_has_just_died():
    """Before the watchdog notices it, messages cannot be delivered."""

    async def run():
        async with engine() as client:
            submission = client.submit([1], LONG)
            await first_delta(submission)
            os.kill(client.pid, signal.SIGKILL)
            while not gone(client.pid):
                time.sleep(0.001)
            # The socket is notified in a separate thread.
            ends = time.monotonic() + 30
            with pytest.raises(EngineDead, match="killed by SIGKILL"):
                while time.monotonic() < ends:
                    client.submit([1], LONG)
                    time.sleep(0.05)
            assert client.dead is None
            await client.stop(30)
            with pytest.raises(EngineDead):
                await collect(submission)

    asyncio.run(run())


PARENT = """
import asyncio, sys
from tests.engine.children import make_client

async def main():
    client = make_client()
    loading = asyncio.create_task(client.start())
    while not hasattr(client, "_child"):
        await asyncio.sleep(0.01)
    if sys.argv[1] == "serving":
        await loading
    print(client.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_the_engine_does_not_outlive_its_parent(moment, private_tmp):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, moment],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait()
    asyncio.run(until(lambda: gone(pid), 10))
    if moment == "loading":
        # Both processes were killed before they removed the sockets' files.
        for left in Path(tempfile.gettempdir()).iterdir():
            shutil.rmtree(left)


def test_a_failing_step_ends_its_requests_only(monkeypatch):
    monkeypatch.setenv("CAIRN_ALLOW_FAULTS", "1")
    faults = "stall:1.2@1,raise@3,raise@5,raise@6,raise@8,raise@9,raise@10"
    monkeypatch.setenv("CAIRN_FAULT", faults)
    short = SamplingParams(max_tokens=2, ignore_eos=True)

    async def run():
        async with engine() as client:
            assert client.step_age == 0.0
            submission = client.submit([1, 2, 3], LONG)
            await until(lambda: client.step_age > 0.5)
            (hit,) = await collect(submission)
            assert hit.last.finish_reason == "error" and hit.last.status == 500
            assert "step 3" in hit.last.error
            assert len(hit.token_ids) == 2
            (hit,) = await collect(client.submit([1, 2, 3], short))
            assert hit.last.finish_reason == "error" and len(hit.token_ids) == 1
            (hit,) = await collect(client.submit([1, 2, 3], short))
            assert hit.last.finish_reason == "error" and not hit.token_ids
            # A successful step resets the count of failures.
            one = SamplingParams(max_tokens=1, ignore_eos=True)
            (fine,) = await collect(client.submit([1, 2, 3], one))
            assert fine.last.finish_reason == "length"
            assert (await client.call("cache"))["problems"] == []
            for _ in range(2):
                (hit,) = await collect(client.submit([1, 2, 3], short))
                assert hit.last.finish_reason == "error"
            with pytest.raises(EngineDead, match="3 steps in a row failed.*step 10"):
                await collect(client.submit([1, 2, 3], short))
            await client.died()

    asyncio.run(run())


@pytest.mark.slow
def test_a_step_that_hangs_is_seen_by_its_age(monkeypatch):
    monkeypatch.setenv("CAIRN_ALLOW_FAULTS", "1")
    monkeypatch.setenv("CAIRN_FAULT", "stall:1.2@1,stall:600@3")

    async def run():
        async with engine(step_limit=3.0) as client:
            assert client.step_age == 0.0
            submission = client.submit([1], LONG)
            await until(lambda: client.step_age > 0.5)
            await first_delta(submission)
            await until(lambda: client.step_age > 2.0)
            with pytest.raises(EngineDead, match="step .* more than 3 seconds"):
                await collect(submission)
            await until(lambda: gone(client.pid), 5)

    asyncio.run(run())


def folder_with_unknown_type(at: Path) -> Path:
    config = json.loads((MODEL / "config.json").read_text())
    (at / "config.json").write_text(json.dumps({**config, "model_type": "abacus"}))
    return at


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (folder_with_unknown_type, {}, BadModel, "abacus"),
        pytest.param(
            lambda _: MODEL,
            {"kv_cache_memory": 8},
            OutOfMemory,
            "Raise kv_cache_memory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_failed_starts_raise_the_engines_error(tmp_path, make, options, error, message):
    async def run():
        client = make_client(options, model=make(tmp_path))
        with pytest.raises(error, match=message):
            await client.start()
        assert gone(client.pid)
        with pytest.raises(EngineDead, match=message):
            client.submit([1], LONG)
        await client.stop(1)

    asyncio.run(run())


def test_a_start_that_is_taken_back_leaves_no_process_and_is_no_fault(caplog):
    async def run():
        client = make_client()
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0.3)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert gone(client.pid)
        assert str(client.dead) == "the engine was stopped"

    asyncio.run(run())
    assert not caplog.records


def test_a_folder_that_holds_no_sockets_is_named(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    async def run():
        with pytest.raises(BadConfig, match="no socket can be made in .*Set TMPDIR"):
            await make_client().start()

    asyncio.run(run())
    assert not list(deep.iterdir())


@pytest.mark.parametrize(
    ("error", "kind", "code", "text"),
    [
        (BadModel("a\nb", "do c"), "BadModel", 2, "a b. do c"),
        (MemoryError(), "OutOfMemory", 2, "--kv-cache-memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "OutOfMemory", 2, "Lower"),
        (InvariantError("two owners"), "EngineDead", 1, "an internal rule was broken: two owners"),
        (KeyError("x"), "EngineDead", 1, "the engine failed with KeyError: 'x'"),
    ],
)
def test_fatal_messages_of_exceptions(error, kind, code, text):
    fatal = fatal_of(error)
    assert (fatal.kind, fatal.exit_code) == (kind, code)
    assert text in fatal.reason and "\n" not in fatal.reason
