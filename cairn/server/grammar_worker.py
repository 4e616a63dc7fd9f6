"""Worker process that compiles clients' grammars, so that a crash or hang cannot affect the server.

Started by `GrammarChecker` as `python -m cairn.server.grammar_worker SECONDS BYTES`. The first
message is a vocabulary, each further one a grammar. The reply is empty if the grammar can be used,
else it is the reason. A grammar that exceeds the time, the memory or the stack ends the process.
"""

from __future__ import annotations

import sys

import msgspec

from cairn.engine.grammar import GrammarCompiler, Vocabulary
from cairn.errors import BadRequest
from cairn.server.worker import Work, serve
from cairn.types import Grammar


def begin(vocabulary: bytes) -> Work:
    """Load the vocabulary. Returns the function that checks a grammar: b"" or the reason against
    it."""
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
