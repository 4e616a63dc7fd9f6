"""The API process's client of the engine: starts it, submits prompts, and streams the outputs.

No torch here. Everything runs in one event loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cairn import errors
from cairn.config import EngineOptions
from cairn.engine import admission
from cairn.engine.admission import CoreShape
from cairn.engine.child import Child
from cairn.engine.messages import (
    Abort,
    Call,
    Delta,
    Fatal,
    FromEngine,
    Heartbeat,
    Launch,
    Outputs,
    Phase,
    Reading,
    Ready,
    Reply,
    Stats,
    Stop,
    Submit,
    pack_ids,
)
from cairn.engine.submission import Submission
from cairn.engine.watchdog import TICK_SECONDS, Watchdog
from cairn.errors import BadRequest, Busy, CairnError, EngineDead
from cairn.obs.log import LEVELS, get_logger
from cairn.runner.media import PromptMedia
from cairn.types import KvTransferParams, SamplingParams

log = get_logger(__name__)

RATE_WINDOW = 256
"""Number of recent completions from which Retry-After of refused requests is estimated."""

LONGEST_WAIT = 60
FIRST_WAIT = 5
"""Largest Retry-After of refused requests, also used before any completion."""

LAST_WORDS_SECONDS = 2.0
"""Seconds that a process may take to exit after its last message."""


class EngineClient:
    """Starts an engine process and talks to it.

    Args:
        model: the model folder.
        options: the engine's options.
        max_waiting: continuations that may wait beside those that run.
        stuck_seconds: seconds without a heartbeat after which the engine process counts as stuck.
        step_limit: seconds that one step may take.
        replica: index of this engine in a Fleet, and the number of engines.
        meeting, listener: see `Launch`.

    Attributes:
        info: what the engine is, after `start`.
        stats: totals and gauges of the last heartbeat.
        phases: seconds of the start-up by phase.
        dead: why the engine has ended, None while it has not.
    """

    info: Ready

    def __init__(
        self,
        model: Path,
        options: EngineOptions,
        *,
        max_waiting: int = 1024,
        stuck_seconds: float = 4.0,
        step_limit: float = 300.0,
        replica: tuple[int, int] = (0, 1),
        meeting: str | None = None,
        listener: int | None = None,
    ) -> None:
        self.stats = Stats()
        self.phases: dict[str, float] = {}
        self.dead: EngineDead | None = None
        self._model = model
        self._options = options
        self._max_waiting = max_waiting
        self._replica, self._meeting, self._listener = replica, meeting, listener
        self._watchdog = Watchdog(stuck_seconds, step_limit)
        self._shape: CoreShape | None = None
        self._submissions: dict[str, Submission] = {}
        self._live = 0
        self._completions: deque[float] = deque(maxlen=RATE_WINDOW)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_number = 0
        self._stopping = False
        self._ended = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._on_phase: Callable[[str, float], object] | None = None

    async def start(self, on_phase: Callable[[str, float], object] | None = None) -> None:
        """Start the engine process and wait until it serves.

        Args:
            on_phase: called with the name and the seconds of every phase that ends.

        Raises:
            BadModel, BadConfig, OutOfMemory: raised by the engine process at start.
            EngineDead: it ended for another reason.
        """
        self._on_phase = on_phase
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        level = logging.getLevelName(logging.getLogger("cairn").level).lower()
        known = level if level in LEVELS else None
        given = self._options, os.getpid(), known, *self._replica, self._meeting, self._listener
        launch = Launch(str(self._model), *given)
        self._child = Child(launch, self._take)
        self._watcher = asyncio.create_task(self._watch(), name="engine watchdog")
        try:
            await self._started
        except BaseException:
            # If it has not exited by itself, it is killed.
            self._stopping = True
            self._child.kill()
            await self._watcher
            raise

    @property
    def serving(self) -> bool:
        """Whether it has started and not ended."""
        return self._shape is not None and self.dead is None

    @property
    def engines(self) -> tuple[EngineClient, ...]:
        """The engines behind this client: itself."""
        return (self,)

    @property
    def down(self) -> dict[int, EngineDead]:
        """Engines that have ended, by number, with the reason."""
        return {} if self.dead is None else {0: self.dead}

    @property
    def step_age(self) -> float:
        """Seconds since the step in flight began, 0 when none runs; counts on when heartbeats are
        missing."""
        return self._watchdog.step_age

    @property
    def load(self) -> tuple[int, int]:
        """Continuations that the engine holds, running or waiting, and the most it may hold.

        A cancelled one counts until the engine has released it.
        """
        rows = self.info.max_num_seqs if self._shape is not None else 0
        return self._live, rows + self._max_waiting

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.pid

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Check that the engine can serve a prompt with these parameters.

        Raises:
            BadRequest: a prompt or parameters that can never be served.
            TooLong: no room for the prompt and one more token.
            EngineDead: the engine does not run.
        """
        admission.check(prompt, params, self._require_shape(), self.info.has_tokenizer)
        _, bound = self.load
        if params.n > bound:
            raise BadRequest(
                f"n is {params.n}, but this server holds {bound} outputs at once",
                "Ask for fewer",
            )

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        request_id: str | None = None,
        media: PromptMedia | None = None,
        transfer: KvTransferParams | None = None,
    ) -> Submission:
        """Have a prompt served.

        Args:
            prompt: user token ids.
            params: how to sample; `n` continuations.
            priority: smaller goes first.
            request_id: unique among the live ones; None: chosen here.
            media: images and videos of the prompt.
            transfer: which engine prefills the prompt and which decodes.

        Raises:
            BadRequest, TooLong: as `check`; also for an id in use.
            Busy: too many continuations are in the engine already.
            EngineDead: it is not there.
        """
        self.check(prompt, params)
        live, bound = self.load
        if live + params.n > bound:
            wait = self._retry_after(live + params.n - bound)
            raise Busy(
                f"{live} outputs are running or waiting, of at most {bound}",
                f"Try again in {wait} s",
                wait,
            )
        name = uuid.uuid4().hex if request_id is None else request_id
        if name in self._submissions:
            raise BadRequest(f"request id {name!r} is in use", "Choose another one")
        self._child.send(Submit(name, pack_ids(prompt), params, priority, media, transfer))
        submission = Submission(self, name, params.n)
        self._submissions[name] = submission
        self._live += params.n
        return submission

    def abort(self, request_id: str) -> None:
        """Abort a request, as Submission.cancel does; unknown ids are ignored: the request may just
        have ended."""
        if self.dead is None and request_id in self._submissions:
            # An engine that has just ended has nothing to abort.
            with contextlib.suppress(EngineDead):
                self._child.send(Abort([request_id]))

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call an engine method other than serving: "flush_cache", "cache" or "profile".

        Raises:
            BadRequest: an unknown method, or wrong arguments.
            CairnError: it failed.
            EngineDead: it is not there.
        """
        self._require_shape()
        self._call_number += 1
        number = self._call_number
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            self._child.send(Call(number, method, arguments))
            return await reply
        finally:
            del self._calls[number]

    async def died(self) -> EngineDead:
        """Wait until the engine has ended; a stuck one is killed. Returns why."""
        await self._ended.wait()
        assert self.dead is not None
        return self.dead

    async def stop(self, timeout: float) -> None:
        """End the engine; running requests are aborted. Waits up to `timeout` seconds, then
        kills."""
        if self._watcher is None:
            return
        self._stopping = True
        if self.dead is None and self._shape is not None:
            # The engine need not be told about a request that has just ended.
            with contextlib.suppress(EngineDead):
                self._child.send(Stop())
        else:
            self._child.kill()
        done, _ = await asyncio.wait({self._watcher}, timeout=timeout)
        if not done:
            self._child.kill()
            await self._watcher

    def _take(self, message: FromEngine) -> None:
        if self.dead is not None:
            # All submissions have ended: later messages have no reader.
            return
        match message:
            case Outputs():
                for delta in message.deltas:
                    self._deliver(delta)
            case Heartbeat():
                self.stats = message.stats
                self._watchdog.beat(message)
            case Reading():
                self._note(message)
            case Reply():
                self._answer(message)
            case Phase():
                self.phases[message.name] = message.seconds
                if self._on_phase is not None:
                    self._on_phase(message.name, message.seconds)
            case Ready():
                self._ready(message)
            case Fatal():
                self._end(error_of(message))

    def _note(self, reading: Reading) -> None:
        for request_id, tokens in reading.read.items():
            # A submission that has just ended is already removed.
            if (submission := self._submissions.get(request_id)) is not None:
                submission.read = tokens

    def _ready(self, info: Ready) -> None:
        self.info = info
        self._shape = CoreShape(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_ids=info.eos_ids,
            seed=0,
            selects=bool(info.selecting_layers),
            media=info.media,
        )
        self._watchdog.loading = False
        if not self._started.done():
            self._started.set_result(None)

    def _deliver(self, delta: Delta) -> None:
        submission = self._submissions[delta.id]
        submission.take(delta)
        if delta.finish_reason is not None:
            self._live -= 1
            self._completions.append(time.monotonic())
            if submission.unfinished == 0:
                del self._submissions[delta.id]

    def _answer(self, reply: Reply) -> None:
        waiting = self._calls.get(reply.number)
        if waiting is None or waiting.done():
            return
        if reply.error is None:
            waiting.set_result(reply.value)
        else:
            kind = BadRequest if reply.status == BadRequest.http_status else CairnError
            waiting.set_exception(kind(reply.error))

    def _require_shape(self) -> CoreShape:
        if self.dead is not None:
            raise self.dead.again()
        if self._shape is None:
            raise EngineDead("the engine is not ready yet", "Try again when it has started")
        return self._shape

    def _retry_after(self, places: int) -> int:
        """Estimated seconds until `places` continuations will have ended, at the recent rate."""
        if len(self._completions) < 2:
            return FIRST_WAIT
        span = time.monotonic() - self._completions[0]
        return max(1, min(LONGEST_WAIT, math.ceil(places * span / len(self._completions))))

    async def _watch(self) -> None:
        """Follow the process to its end, killing it when it is stuck."""
        killed_after: float | None = None
        while self._child.alive:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if self.dead is not None:
                killed_after = killed_after or now + LAST_WORDS_SECONDS
                if now > killed_after:
                    self._child.kill()
            elif (reason := self._watchdog.tick()) is not None:
                self._child.kill()
                self._end(EngineDead(reason, "Look at its last log lines; start the server again"))
        # Messages that the process sent before it ended may still be in the socket.
        await asyncio.sleep(0.05)
        self._child.receive()
        ordered = EngineDead("the engine was stopped")
        self._end(ordered if self._stopping else self._child.exit_reason())
        self._child.close()

    def _end(self, error: CairnError) -> None:
        """Fail all pending submissions and calls with `error`, once."""
        if self.dead is not None:
            return
        number, replicas = self._replica
        name = f"replica {number}: " if replicas > 1 else ""
        dead = EngineDead(name + error.message, error.hint)
        if not self._started.done():
            self._started.set_exception(error)
        elif not self._stopping:
            log.error("%s", dead)
        if replicas > 1:
            dead = EngineDead(dead.message, "Send the request again, to another replica", 1)
        self.dead = dead
        for submission in self._submissions.values():
            submission.fail(dead)
        self._submissions.clear()
        self._live = 0
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(dead.again())
        self._ended.set()


def error_of(fatal: Fatal) -> CairnError:
    """The engine's final message as an exception of the class raised in the engine."""
    kind = getattr(errors, fatal.kind, EngineDead)
    if isinstance(kind, type) and issubclass(kind, CairnError):
        return kind(fatal.reason)
    return EngineDead(fatal.reason)
