"""Compiles clients' grammars in a worker process before the engine gets them."""

from __future__ import annotations

import hashlib
import signal
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from cairn.engine.grammar import TokenTable, Vocabulary, check_text, refused
from cairn.errors import BadRequest, Busy
from cairn.server.workers import Ended, WorkerPool
from cairn.types import Grammar

WORKERS = 2
SECONDS = 1.5
MEMORY = 1 << 30
MAX_WAITING = 64
VERDICTS = 512


class GrammarChecker:
    """Checks whether a grammar can be used.

    A worker process with bounded memory compiles each grammar and runs it once. A worker that
    exceeds its time is replaced. Results are cached.

    Args:
        workers: maximum number of processes.
        seconds: time limit of one grammar.
        memory: address space of a worker in bytes.
        max_waiting: maximum number of checks that wait or run.
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
        self._max_waiting = max_waiting
        self._vocabulary: Future[bytes] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cairn-vocabulary")
        self._pool = WorkerPool(
            "cairn.server.grammar_worker",
            self._first,
            workers=workers,
            seconds=seconds,
            memory=memory,
        )
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def open(self, table: TokenTable, vocab_size: int) -> None:
        """Prepare for the grammars of a model, in a thread.

        Args:
            table: the tokenizer's tokens.
            vocab_size: number of token ids of the model.
        """
        self._vocabulary = self._reader.submit(_vocabulary, table, vocab_size)
        self._pool.prepare()

    async def check(self, grammar: Grammar) -> None:
        """Check a grammar.

        Raises:
            BadRequest: the grammar is invalid, too large or too complex.
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
                verdict = await self._judge(grammar)
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
        """Stop the workers. Running checks fail."""
        self._pool.close()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _first(self) -> bytes:
        if self._vocabulary is None:
            raise BadRequest("this model has no tokenizer", "Leave the grammar out")
        return self._vocabulary.result()

    async def _judge(self, grammar: Grammar) -> str:
        """Have a worker check the grammar. Returns "" or the reason against it."""
        try:
            return (await self._pool.ask(msgspec.msgpack.encode(grammar))).decode()
        except Ended as ended:
            if ended.signal != signal.SIGALRM:
                reason = "it takes too much memory or is nested too deeply"
                return str(refused(grammar, reason))
            # Do not cache a timeout: the check may pass on an idle machine.
            reason = f"compiling it takes more than {self._seconds:g} seconds"
            raise refused(grammar, reason) from None


def _vocabulary(table: TokenTable, vocab_size: int) -> bytes:
    return msgspec.msgpack.encode(Vocabulary.read(table, vocab_size))
