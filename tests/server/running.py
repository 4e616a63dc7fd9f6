"""A real server in a child process, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

PROGRAM = "from cairn.cli.main import main; main()"
POOL = ("--kv-cache-memory", "64MiB", "--max-model-len", "8192")
START_SECONDS = 120


def command(*arguments):
    return [sys.executable, "-c", PROGRAM, "serve", *arguments]


def environment(**changes):
    return {**os.environ, "OMP_NUM_THREADS": "1", "CAIRN_LOG": "warning", **changes}


def fails(*arguments, timeout=60, **changes):
    """Runs a server that fails to start; returns (exit code, stderr, seconds)."""
    began = time.monotonic()
    ran = subprocess.run(
        command(*arguments),
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return ran.returncode, ran.stderr, time.monotonic() - began


class Running:
    """A server whose ports are bound; `wait_ready` waits for its model."""

    def __init__(self, folder: Path, *arguments, **changes):
        self.out, self.err = folder / "out.log", folder / "err.log"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command("--port", "0", *arguments),
                env=environment(**changes),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.url = self._address("API")
        self.admin = self._address("admin") if "--admin-port" not in arguments else None

    def _address(self, label):
        pattern = re.compile(rf"^\s*{label}\s+(http://\S+)", re.MULTILINE)
        return self.wait_for(lambda: pattern.search(self.out.read_text()))[1]

    def wait_for(self, condition, seconds=START_SECONDS):
        """Poll until the condition returns something true; fails with the log after a time
        limit."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, self.told()
            assert self.process.poll() is None or condition(), self.told()
            time.sleep(0.05)
        return found

    def told(self):
        return f"{self.out.read_text()}\n{self.err.read_text()}"

    def wait_ready(self):
        self.wait_for(lambda: self.get("/ready").status_code == 200)
        return self

    def get(self, path, **arguments):
        return httpx.get(self.url + path, timeout=30, **arguments)

    def complete(self, prompt="hello", **fields):
        body = {"prompt": prompt, "max_tokens": 4, **fields}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=60)

    def ledger(self):
        return httpx.get(self.admin + "/admin/cache", timeout=30).json()

    @property
    def engine(self):
        """The engine process."""
        for child in psutil.Process(self.process.pid).children():
            if "cairn.engine.process" in child.cmdline():
                return child
        raise AssertionError("no engine process")

    def signal(self, number):
        self.process.send_signal(number)

    def wait_end(self, seconds=60):
        """Wait for the end of the process; returns the exit code."""
        return self.process.wait(seconds)

    def close(self):
        for process in (*self._family(), self.process):
            process.kill()
        self.process.wait()

    def _family(self):
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


@contextmanager
def running(folder: Path, *arguments, **changes):
    """A ready server, which is stopped afterwards."""
    server = Running(folder, *POOL, *arguments, **changes)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def message(body, path="/v1/completions"):
    """The bytes of a POST request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Stream:
    """A streamed completion over a plain socket, which can be closed at any point."""

    def __init__(self, url, **fields):
        self._address = url.removeprefix("http://").split(":")
        self._body = {"prompt": "hello", "stream": True, "temperature": 0, **fields}
        self.text = ""

    async def open(self):
        host, port = self._address
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        self.writer.write(message(self._body))
        return self

    async def begin(self):
        """Read until the first piece of text has arrived."""
        await self.open()
        while self.text.count("data: ") < 2:
            assert await self._read(), self.text
        return self

    async def finish(self):
        """Read to the end; returns everything."""
        while not self.ended and await self._read():
            pass
        self.writer.close()
        return self.text

    async def _read(self):
        data = await self.reader.read(65536)
        self.text += data.decode("utf-8", "replace")
        return bool(data)

    @property
    def ended(self):
        return "data: [DONE]" in self.text or self.text.endswith("\r\n0\r\n\r\n")

    @property
    def status(self):
        return int(self.text.split(" ", 2)[1])

    def break_off(self):
        """Reset the connection."""
        self.writer.transport.abort()


def stopped(pid, seconds):
    """Stop a process (SIGSTOP) for a while."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def worker_pids(module: str) -> set[int]:
    """Child processes of this process that run a worker module of the server."""
    pids = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if f"cairn.server.{module}" in child.cmdline():
                pids.add(child.pid)
    return pids
