"""A process that compiles what clients send, so that nothing they send can hurt the server.

Started by `GrammarChecker`: `python -m cairn.server.grammar_worker SECONDS BYTES`. It reads a
vocabulary and then grammars from the standard input and answers each with a verdict on the
standard output: empty when the grammar can be used, else the reason. A grammar that takes more
than SECONDS, that much memory or too deep a stack ends the process.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from typing import BinaryIO

import msgspec

from cairn.engine.grammar import GrammarCompiler, Vocabulary
from cairn.errors import BadRequest
from cairn.types import Grammar

HEADER = 8
"""A message is its length in this many bytes, little-endian, and its MessagePack form."""
START_SECONDS = 30.0
READY = "ready"
STACK_BYTES = 4 << 20


def framed(data: bytes) -> bytes:
    """A message as it travels."""
    return len(data).to_bytes(HEADER, "little") + data


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message, None when the stream has ended."""
    header = stream.read(HEADER)
    if len(header) < HEADER:
        return None
    size = int.from_bytes(header, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def main(seconds: float, memory: int) -> None:
    """Answer until the standard input ends."""
    # A terminal's Ctrl-C reaches every process of its group: the server says when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # The alarm's default action ends the process, whatever native code it is in.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
    # What a library prints must not get among the answers.
    answers: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # What passes here must pass in the engine, whose stacks are deeper.
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(answers, seconds))
    thread.start()
    thread.join()


def _serve(answers: BinaryIO, seconds: float) -> None:
    vocabulary = read_message(sys.stdin.buffer)
    if vocabulary is None:
        return
    compiler = GrammarCompiler(msgspec.msgpack.decode(vocabulary, type=Vocabulary))
    signal.setitimer(signal.ITIMER_REAL, 0)
    answers.write(framed(READY.encode()))
    while (message := read_message(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        verdict = ""
        try:
            compiler.probe(msgspec.msgpack.decode(message, type=Grammar))
        except BadRequest as error:
            verdict = str(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(framed(verdict.encode()))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
