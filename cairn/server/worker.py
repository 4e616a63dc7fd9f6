"""Main loop of a worker process, which isolates untrusted work from the server.

It reads messages from the standard input and answers each on the standard output. One that takes
more than its time ends the process, whatever code it is in; its memory is bounded.
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
"""A message is its length in this many bytes, little-endian, and its bytes."""
START_SECONDS = 30.0
READY = b"ready"
STACK_BYTES = 4 << 20

Work = Callable[[bytes], bytes]
"""Answers one message."""


def framed(data: bytes) -> bytes:
    """A message as it travels."""
    return len(data).to_bytes(HEADER, "little") + data


def serve(begin: Callable[[bytes], Work], seconds: float, memory: int) -> None:
    """Answer until the standard input ends.

    Args:
        begin: gets ready with the first message, within START_SECONDS, and returns what answers
            the others.
        seconds: for each message, by the clock.
        memory: bytes of address space of this process.
    """
    # A terminal's Ctrl-C reaches every process of its group: the server says when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # The alarm's default action ends the process, whatever native code it is in.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
    # stdout carries the answers: redirect what libraries print.
    answers: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # What passes here must pass in the engine, whose stacks are deeper.
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
    """The next message, None when the stream has ended."""
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
