"""Worker process that compiles grammars of clients; a crash or hang cannot affect the server.

Started by `GrammarChecker`: `python -m cairn.server.grammar_worker SECONDS BYTES`. Its first
message is a vocabulary, the others are grammars. It answers each with a verdict: empty when the
grammar can be used, else the reason. A grammar that takes more than SECONDS, that much memory or
too deep a stack ends the process.
"""

from __future__ import annotations

import sys

import msgspec

from cairn.engine.grammar import GrammarCompiler, Vocabulary
from cairn.errors import BadRequest
from cairn.server.worker import Work, serve
from cairn.types import Grammar


def begin(vocabulary: bytes) -> Work:
    """The function that checks grammars for the vocabulary: b"", or why one is refused."""
    compiler = GrammarCompiler(msgspec.msgpack.decode(vocabulary, type=Vocabulary))

    def verdict(message: bytes) -> bytes:
        try:
            compiler.probe(msgspec.msgpack.decode(message, type=Grammar))
        except BadRequest as error:
            return str(error).encode()
        return b""

    return verdict


if __name__ == "__main__":
    serve(begin, float(sys.argv[1]), int(sys.argv[2]))
