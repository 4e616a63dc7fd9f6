"""Main loop of a worker process, which isolates untrusted work from the server.

It reads messages from stdin and writes a reply to each to stdout. SIGALRM ends the process when a
message exceeds its time limit, even inside native code; RLIMIT_AS bounds the memory.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

HEADER = 8
"""Size in bytes of the little-endian length that precedes each message."""
START_SECONDS = 30.0
READY = b"ready"
STACK_BYTES = 4 << 20

Work = Callable[[bytes], bytes]
"""Computes the reply to a message."""


def framed(data: bytes) -> bytes:
    """A message with its length prefix."""
    return len(data).to_bytes(HEADER, "little") + data


def serve(begin: Callable[[bytes], Work], seconds: float, memory: int) -> None:
    """Reply to messages until stdin is closed.

    Args:
        begin: initializes the worker with the first message, within START_SECONDS, and returns the
            function for the others.
        seconds: time limit of each message.
        memory: address space of this process in bytes.
    """
    # Ctrl-C in a terminal reaches the whole process group, but only the server ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # The default action of SIGALRM ends the process even inside native code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
    # stdout carries the replies, so redirect what libraries print.
    answers: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # The stack is smaller than the engine's, so that work that succeeds here succeeds there.
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer, args=(begin, answers, seconds))
    thread.start()
    thread.join()


def _answer(begin: Callable[[bytes], Work], answers: BinaryIO, seconds: float) -> None:
    first = _read(sys.stdin.buffer)
    if first is None:
        return
    work = begin(first)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _write(answers, READY)
    while (message := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = work(message)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, answer)


def _read(stream: BinaryIO) -> bytes | None:
    """Read a message; None at the end of the stream."""
    header = stream.read(HEADER)
    if len(header) < HEADER:
        return None
    size = int.from_bytes(header, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def _write(answers: BinaryIO, data: bytes) -> None:
    left = memoryview(framed(data))
    while left:
        left = left[answers.write(left) :]
