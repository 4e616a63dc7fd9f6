"""Clients' grammars are tried in a process beside the server before the engine sees them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from cairn.engine.grammar import TokenTable, Vocabulary, check_text, refused
from cairn.errors import BadRequest, Busy, CairnError
from cairn.server.grammar_worker import HEADER, READY, START_SECONDS, framed
from cairn.types import Grammar

WORKERS = 2
SECONDS = 1.5
MEMORY = 1 << 30
MAX_WAITING = 64
VERDICTS = 512
GRACE_SECONDS = 1.0
"""A worker ends itself when its time is up; after this much more it is ended from outside."""


class GrammarChecker:
    """Says whether a grammar can be used, whatever it is.

    Each grammar is compiled and tried out by a worker process with bounded memory; a worker that
    takes too long ends and is replaced. Verdicts are remembered.

    Args:
        workers: processes at most.
        seconds: time for one grammar.
        memory: bytes of address space of a worker.
        max_waiting: checks that may wait or run at once.
    """

    def __init__(
        self,
        *,
        workers: int = WORKERS,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._seconds = seconds
        self._memory = memory
        self._max_waiting = max_waiting
        self._vocabulary: Future[bytes] | None = None
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="cairn-grammars")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._closed = False
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def open(self, table: TokenTable, vocab_size: int) -> None:
        """Get ready for the grammars of a model, in a thread.

        Args:
            table: the tokenizer.
            vocab_size: ids of the model.
        """
        self._vocabulary = self._threads.submit(_vocabulary, table, vocab_size)
        self._threads.submit(self._replace)

    async def check(self, grammar: Grammar) -> None:
        """Pass a grammar that the engine can use.

        Raises:
            BadRequest: it is wrong, too large or too complex.
            Busy: too many grammars are being checked.
        """
        check_text(grammar)
        key = hashlib.blake2b(f"{grammar.kind}\n{grammar.text}".encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            if self._waiting >= self._max_waiting:
                raise Busy(
                    f"{self._waiting} grammars are being checked", "Try again later", retry_after=2
                )
            self._waiting += 1
            try:
                loop = asyncio.get_running_loop()
                verdict = await loop.run_in_executor(self._threads, self._judge, grammar)
            finally:
                self._waiting -= 1
            self._verdicts[key] = verdict
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(key)
        if verdict:
            raise BadRequest(verdict)

    def close(self) -> None:
        """End the workers. Checks in flight fail."""
        with self._lock:
            self._closed = True
            workers = tuple(self._workers)
        for worker in workers:
            worker.kill()
        # The pipes of the others belong to the threads that wait for an answer.
        while self._idle:
            self._drop(self._idle.pop())
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _replace(self) -> None:
        """Have a worker ready for the next grammar."""
        if not self._idle and not self._closed:
            self._idle.append(self._start())

    def _judge(self, grammar: Grammar) -> str:
        """The verdict of a worker; empty: the grammar can be used."""
        try:
            try:
                return self._ask(grammar)
            except _Ended as ended:
                if ended.signal != signal.SIGKILL:
                    raise
                # Killed from outside, maybe before it saw the grammar.
                return self._ask(grammar)
        except _Ended as ended:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._threads.submit(self._replace)
            if ended.signal != signal.SIGALRM:
                reason = "it takes too much memory or is nested too deeply"
                return str(refused(grammar, reason))
            # Not remembered: on an idle machine it may pass.
            reason = f"compiling it takes more than {self._seconds:g} seconds"
            raise refused(grammar, reason) from None

    def _ask(self, grammar: Grammar) -> str:
        worker = self._take()
        try:
            verdict = worker.ask(grammar)
        except _Ended:
            self._drop(worker)
            raise
        self._idle.append(worker)
        return verdict

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
        if self._vocabulary is None:
            raise BadRequest("this model has no tokenizer", "Leave the grammar out")
        vocabulary = self._vocabulary.result()
        worker = _Worker(self._seconds, self._memory)
        with self._lock:
            self._workers.add(worker)
        if self._closed:
            worker.kill()
        try:
            worker.begin(vocabulary)
        except _Ended:
            self._drop(worker)
            raise CairnError(
                "the process that checks grammars cannot be started",
                f"It may need more than the {self._memory} bytes that it gets",
            ) from None
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            self._workers.discard(worker)


class _Ended(Exception):
    """A worker is no more.

    Args:
        signal: what ended it: SIGALRM: its time was up; 0: it ended by itself.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class _Worker:
    """One process; see `cairn.server.grammar_worker`. Used by one thread at a time."""

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds = seconds
        # -P: a module in the working directory must not pass for one of ours.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cairn.server.grammar_worker", str(seconds), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # One thread does the work; pools of others would only take address space.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self._to, self._from = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._to, False)

    @property
    def alive(self) -> bool:
        """The process has not ended."""
        return self._process.poll() is None

    def begin(self, vocabulary: bytes) -> None:
        """Give it the vocabulary and wait until it is ready. Raises _Ended."""
        if self._exchange(vocabulary, START_SECONDS) != READY:
            raise _Ended(0)

    def ask(self, grammar: Grammar) -> str:
        """Its verdict. Raises _Ended."""
        return self._exchange(msgspec.msgpack.encode(grammar), self._seconds)

    def kill(self) -> None:
        """End the process; who waits for its answer sees that."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """End the process and let go of it."""
        self.kill()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # what was not sent is lost
                pipe.close()

    def _exchange(self, message: bytes, seconds: float) -> str:
        """Send a message and wait for the answer. Raises _Ended."""
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        try:
            left = memoryview(framed(message))
            while left:
                _wait(self._to, select.POLLOUT, deadline)
                left = left[os.write(self._to, left) :]
            size = int.from_bytes(self._receive(HEADER, deadline), "little")
            return self._receive(size, deadline).decode()
        except TimeoutError:
            raise _Ended(signal.SIGALRM) from None
        except (OSError, EOFError):
            raise _Ended(-self._process.wait()) from None

    def _receive(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            _wait(self._from, select.POLLIN, deadline)
            part = os.read(self._from, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a pipe can be written or read. Raises TimeoutError."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _vocabulary(table: TokenTable, vocab_size: int) -> bytes:
    return msgspec.msgpack.encode(Vocabulary.read(table, vocab_size))
