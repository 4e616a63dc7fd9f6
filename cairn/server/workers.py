"""A pool of worker processes, each replaced when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cairn.errors import CairnError
from cairn.server.worker import HEADER, READY, START_SECONDS, framed

GRACE_SECONDS = 1.0
"""Seconds after its time limit when a worker that is still running is killed."""


class Ended(Exception):
    """A worker ended before it replied.

    Args:
        signal: number of the signal that ended it (SIGALRM at its time limit); 0 if it exited.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class WorkerPool:
    """Processes that run `cairn.server.worker.serve`, started on demand.

    Args:
        module: module to run as `python -m MODULE SECONDS BYTES`.
        first: returns the first message of a worker; called in a thread.
        workers: maximum number of processes.
        seconds: time limit of one message.
        memory: address space of a worker in bytes.
    """

    def __init__(
        self, module: str, first: Callable[[], bytes], *, workers: int, seconds: float, memory: int
    ) -> None:
        self._module = module
        self._first = first
        self._seconds = seconds
        self._memory = memory
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=module)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._closed = False

    def prepare(self) -> None:
        """Start a worker for the next message in the background."""
        with contextlib.suppress(RuntimeError):  # closed by another thread
            self._threads.submit(self._replace)

    async def ready(self) -> None:
        """Wait until a worker is running. Raises CairnError if none can be started."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._replace)

    async def ask(self, message: bytes) -> bytes:
        """Send a message to a worker and return its reply.

        Raises:
            Ended: the worker ended before it replied.
            CairnError: no worker can be started.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._exchange, message)

    def close(self) -> None:
        """Stop the workers. Pending calls of `ask` raise Ended."""
        with self._lock:
            self._closed = True
            workers = tuple(self._workers)
        for worker in workers:
            worker.kill()
        # Busy workers are closed by the threads that wait for their replies.
        while self._idle:
            self._drop(self._idle.pop())
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _replace(self) -> None:
        if not self._idle and not self._closed:
            self._idle.append(self._start())

    def _exchange(self, message: bytes) -> bytes:
        try:
            try:
                return self._try(message)
            except Ended as ended:
                if ended.signal != signal.SIGKILL:
                    raise
                # Killed from outside, possibly before it received the message.
                return self._try(message)
        except Ended:
            self.prepare()
            raise

    def _try(self, message: bytes) -> bytes:
        worker = self._take()
        try:
            answer = worker.exchange(message, self._seconds)
        except Ended:
            self._drop(worker)
            raise
        self._idle.append(worker)
        return answer

    def _take(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return self._start()
            if worker.alive:
                return worker
            self._drop(worker)

    def _start(self) -> _Worker:
        first = self._first()
        worker = _Worker(self._module, self._seconds, self._memory)
        with self._lock:
            self._workers.add(worker)
        if self._closed:
            worker.kill()
        try:
            if worker.exchange(first, START_SECONDS) != READY:
                raise Ended(0)
        except Ended:
            self._drop(worker)
            raise CairnError(
                f"the worker process {self._module} cannot be started",
                f"It gets {self._memory} bytes and {START_SECONDS:g} seconds for its start",
            ) from None
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            self._workers.discard(worker)


class _Worker:
    """A worker process. Used by one thread at a time."""

    def __init__(self, module: str, seconds: float, memory: int) -> None:
        # -P: do not import modules from the working directory.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(seconds), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Thread pools of libraries would only use up address space.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self._to, self._from = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._to, False)

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process. A pending `exchange` raises Ended."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill the process, wait for it and close its pipes."""
        self.kill()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # unsent data is dropped
                pipe.close()

    def exchange(self, message: bytes, seconds: float) -> bytes:
        """Send a message and wait for the reply. Raises Ended."""
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        try:
            left = memoryview(framed(message))
            while left:
                _wait(self._to, select.POLLOUT, deadline)
                left = left[os.write(self._to, left) :]
            size = int.from_bytes(self._receive(HEADER, deadline), "little")
            return self._receive(size, deadline)
        except TimeoutError:
            raise Ended(signal.SIGALRM) from None
        except (OSError, EOFError):
            raise Ended(-self._process.wait()) from None

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._from, select.POLLIN, deadline)
            part = os.read(self._from, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a pipe is ready for `event`. Raises TimeoutError at `deadline`."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
