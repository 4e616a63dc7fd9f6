"""The engine process's main loop: handle messages, run a step, send results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import msgspec
import zmq

from cairn.cache.host import PAGE
from cairn.cache.invariants import Report, examine
from cairn.distributed.rounds import EnginesStopped
from cairn.engine.build import Built
from cairn.engine.continuation import Continuation
from cairn.engine.messages import (
    Abort,
    Call,
    Delta,
    FromEngine,
    Outputs,
    Position,
    Positions,
    Reading,
    Reply,
    Stats,
    Stop,
    Submit,
    ToEngine,
    unpack_ids,
)
from cairn.engine.profile import StepProfile
from cairn.errors import BadRequest, CairnError, EngineDead, InvariantError
from cairn.obs.log import get_logger
from cairn.runner.orders import CAPTURES

log = get_logger(__name__)

FAILURES_ALLOWED = 2
"""Failing steps in a row that the engine survives."""

STATS_SECONDS = 0.2
"""Totals are put together at most this often while steps run."""

ROUND_SECONDS = 0.005
"""Pause between rounds of engines that share experts while none of them has work."""

LEDGER_SECONDS = 1.0
"""Idle seconds after which the page bookkeeping is checked."""


class Vitals(Protocol):
    """The state that heartbeats report; the heartbeat thread only reads it."""

    stats: Stats
    step_began: float | None


@dataclass(slots=True, eq=False)
class _Part:
    """A continuation with its name and the number of tokens already sent to the client."""

    continuation: Continuation
    id: str
    index: int
    sent: int = 0
    told: bool = False


class EngineLoop:
    """Serves the client's messages until it sends Stop.

    Args:
        built: the engine.
        inbox: a PULL socket with the client's messages.
        send: sends one message to the client.
        vitals: where the heartbeat thread looks.
    """

    def __init__(
        self,
        built: Built,
        inbox: zmq.Socket[bytes],
        send: Callable[[FromEngine], None],
        vitals: Vitals,
    ) -> None:
        self._built = built
        self._core, self._rounds = built.core, built.rounds
        self._inbox = inbox
        self._send = send
        self._vitals = vitals
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._requests: dict[str, list[_Part]] = {}
        self._parts: dict[str, _Part] = {}
        self._deltas: list[Delta] = []
        self._moved: list[Continuation] = []
        self._moved_parts: list[_Part] = []
        self._profile: tuple[int, StepProfile] | None = None
        self._failures = 0
        self._leaked = 0
        self._audited = False
        self._stats_due = 0.0
        # Graphs that warm-up has left are captured while nothing runs.
        self._captures = list(CAPTURES) if built.runner.graphs is not None else []
        self._calls: dict[str, Callable[..., Any]] = {
            "flush_cache": self._flush_cache,
            "cache": self._cache,
        }

    def run(self) -> None:
        """Serve until a Stop message; running requests are dropped then.

        Raises:
            InvariantError: an internal bookkeeping rule was broken.
            EngineDead: another rank has ended, or several consecutive steps failed.
        """
        with suppress(EnginesStopped):
            while self._intake():
                self._step()

    def _intake(self) -> bool:
        """Handle all pending messages; wait for one if there is no work. False: stop."""
        while True:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._publish()
                if self._core.has_work:
                    return True
                self._rest()
                continue
            message = self._decoder.decode(frame)
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    for request_id in message.ids:
                        self._abort(request_id)
                case Call():
                    self._call(message)
                case Stop():
                    if self._rounds is not None:
                        self._rounds.stop()
                    return False

    def _rest(self) -> None:
        """Wait for a message. Meanwhile capture graphs, one at a time, then check the page ledger
        and end an overdue profile."""
        self._refresh_stats()
        self._moved, self._moved_parts = [], []
        if self._captures:
            if not self._core.executor.call(self._captures[0]):
                del self._captures[0]
            return
        waits = [] if self._audited else [LEDGER_SECONDS]
        if self._rounds is not None:
            if self._rounds.idle():
                return
            waits.append(ROUND_SECONDS)
        if self._profile is not None:
            waits.append(self._profile[1].seconds_left)
        if self._inbox.poll(math.ceil(1000 * min(waits)) if waits else None):
            return
        if not self._audited:
            self._audit()
        if self._profile is not None and self._profile[1].seconds_left == 0:
            self._end_profile()

    def _step(self) -> None:
        self._vitals.step_began = time.monotonic()
        try:
            rounds, step = self._rounds, self._core.step
            moved = step() if rounds is None else rounds.around(step)
            if moved is not self._moved:
                # Decode-only steps return the same list object again and again.
                self._moved = moved
                self._moved_parts = [self._parts[c.request.id] for c in moved]
            changed = self._moved_parts
            self._failures = 0
        except (InvariantError, EngineDead):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model raises ends its step only
            changed = self._failed(error)
        finally:
            self._vitals.step_began = None
        self._deltas += [self._delta(part) for part in changed]
        self._publish()
        self._audited = False
        if self._profile is not None and self._profile[1].step():
            self._end_profile()
        if time.monotonic() >= self._stats_due:
            self._refresh_stats()
            self._tell_reading()

    def _failed(self, error: Exception) -> list[_Part]:
        """The continuations that a failing step ended. Raises what the engine cannot survive."""
        ended = [part for part in self._parts.values() if part.continuation.finished]
        if not ended:
            raise error
        log.error("a step failed and ends %d outputs", len(ended), exc_info=error)
        self._failures += 1
        if self._failures > FAILURES_ALLOWED:
            raise EngineDead(
                f"{self._failures} steps in a row failed, the last with "
                f"{type(error).__name__}: {error}",
                "Look at the log above for where; start the server again",
            ) from error
        return ended

    def _submit(self, message: Submit) -> None:
        prompt = unpack_ids(message.prompt)
        # Prompt log-probabilities are the prompt's, not a continuation's: the first reports them.
        others = replace(message.params, prompt_logprobs=None)
        parts: list[_Part] = []
        try:
            for index in range(message.params.n):
                continuation = self._core.add(
                    f"{message.id}.{index}",
                    prompt,
                    others if index else message.params,
                    index=index,
                    priority=message.priority,
                    media=message.media,
                    transfer=message.transfer,
                )
                parts.append(_Part(continuation, message.id, index))
        except CairnError as error:
            for part in parts:
                self._core.abort(part.continuation.request.id)
            self._refuse(message, error)
            return
        self._requests[message.id] = parts
        for part in parts:
            self._parts[part.continuation.request.id] = part

    def _refuse(self, message: Submit, error: CairnError) -> None:
        """End every continuation of a request that cannot be started."""
        self._deltas += [
            Delta(
                message.id,
                index,
                finish_reason="error",
                error=str(error),
                status=error.http_status,
            )
            for index in range(message.params.n)
        ]

    def _abort(self, request_id: str) -> None:
        for part in tuple(self._requests.get(request_id, ())):
            self._core.abort(part.continuation.request.id)
            self._deltas.append(self._delta(part))

    def _delta(self, part: _Part) -> Delta:
        """The Delta of what the client does not know yet of a continuation; forgets the
        continuation when it has ended."""
        continuation, sent = part.continuation, part.sent
        stream = continuation.stream
        output = stream.output
        part.sent = len(output.token_ids)
        if part.told and output.finish_reason is None and not stream.reports:
            # The most frequent case: a step has one such delta per row.
            return Delta(part.id, part.index, stream.take(), tuple(output.token_ids[sent:]))
        first = not part.told and part.index == 0
        part.told = True
        if output.finish_reason is not None:
            self._forget(part)
        prompt = continuation.prompt_logprobs if first else None
        scores = (Position.of(*entry.columns) for entry in (output.logprobs or ())[sent:])
        return Delta(
            id=part.id,
            index=part.index,
            text=stream.take(),
            token_ids=tuple(output.token_ids[sent:]),
            logprobs=tuple(scores),
            selection=tuple(output.selection[sent:]) if output.selection else (),
            prompt_logprobs=None if prompt is None else tuple(map(Positions.of, prompt.parts)),
            cached_tokens=continuation.request.cached if first else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            timing=continuation.moments.timing,
            error=continuation.error,
            status=continuation.status,
            transfer=continuation.transfer,
        )

    def _forget(self, part: _Part) -> None:
        del self._parts[part.continuation.request.id]
        unfinished = self._requests[part.id]
        unfinished.remove(part)
        if not unfinished:
            del self._requests[part.id]

    def _publish(self) -> None:
        """Send all new deltas in one message."""
        if self._deltas:
            self._send(Outputs(self._deltas))
            self._deltas = []

    def _call(self, call: Call) -> None:
        method = self._calls.get(call.method)
        if call.method == "profile":
            self._begin_profile(call)
        elif method is not None:
            self._answer(call.number, lambda: method(**call.arguments))
        else:
            self._send(Reply(call.number, error=f"no method {call.method!r}", status=400))

    def _tell_reading(self) -> None:
        """Report the progress of prompts that are still being prefilled."""
        read = {
            part.id: part.continuation.request.computed
            for part in self._parts.values()
            if not part.told and part.index == 0 and part.continuation.request.computed
        }
        if read:
            self._send(Reading(read))

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        """Reply with the result of `work`, or with its error."""
        with self._failures_replied(number):
            self._send(Reply(number, work()))

    @contextmanager
    def _failures_replied(self, number: int) -> Iterator[None]:
        """Context manager: an exception inside becomes the reply to the call and is not
        propagated."""
        try:
            yield
        except CairnError as error:
            self._send(Reply(number, error=str(error), status=error.http_status))
        except Exception as error:
            # A failing call must not end the engine.
            log.exception("a call failed")
            self._send(Reply(number, error=f"{type(error).__name__}: {error}"))

    def _flush_cache(self) -> dict[str, int]:
        return {"pages": self._core.cache.reset()}

    def _cache(self) -> dict[str, Any]:
        report = self._examine()
        return {"report": str(report), **asdict(report)}

    def _begin_profile(self, call: Call) -> None:
        """Start a profile; the call is answered when it ends, or at once if it cannot start."""
        with self._failures_replied(call.number):
            if self._profile is not None:
                raise BadRequest("a profile is being taken", "Wait for it to end")
            self._profile = call.number, StepProfile(**call.arguments)

    def _end_profile(self) -> None:
        assert self._profile is not None
        number, profile = self._profile
        self._profile = None
        self._answer(number, profile.finish)

    def _examine(self) -> Report:
        leases = [r.lease for r in self._core.scheduler.running if r.lease is not None]
        return examine(self._core.cache, leases)

    def _audit(self) -> None:
        """Check the page ledger while nothing runs."""
        report = self._examine()
        self._leaked = len(report.leaked) + (len(report.window.leaked) if report.window else 0)
        self._audited = True
        for problem in report.problems:
            log.error("the ledger of pages is wrong: %s", problem)
        self._refresh_stats()

    def _host_stats(self) -> dict[str, Any]:
        host, transfers = self._core.cache.host, self._core.transfers
        if host is None:
            return {}
        return {
            "host_pages_total": host.slots[PAGE].allocator.num_pages,
            "host_pages_kept": len(host.slots[PAGE].kept),
            "host_records_stored": host.stored,
            "host_records_loaded": host.loaded,
            "host_records_damaged": host.damaged,
            "load_failures": {} if transfers is None else dict(transfers.failures),
        }

    def _refresh_stats(self) -> None:
        """Compute the totals, in the loop's thread, so that nothing changes meanwhile."""
        self._stats_due = time.monotonic() + STATS_SECONDS
        scheduler, cache, runner = self._core.scheduler, self._core.cache, self._built.runner
        known = {f.name for f in fields(self._core.stats)}
        totals = {n: getattr(self._core.stats, n) for n in Stats.__struct_fields__ if n in known}
        # Some have ended, and keep their pages until the step in flight is over.
        running = sum(not request.doomed for request in scheduler.running)
        frame_hits, frame_misses, frame_bytes = runner.pools.frame_traffic()
        self._vitals.stats = Stats(
            **totals,
            **self._host_stats(),
            running=running,
            waiting=len(self._parts) - running,
            pages_total=cache.num_pages,
            pages_free=cache.num_free,
            pages_cached=cache.num_evictable,
            window_pages_total=cache.window.num_pages if cache.window else 0,
            window_pages_free=cache.window.num_free if cache.window else 0,
            window_pages_cached=cache.window.num_kept if cache.window else 0,
            pages_leaked=self._leaked,
            prefix_queries=scheduler.looked_up_prompt_tokens,
            prefix_hits=scheduler.cached_prompt_tokens,
            preemptions=scheduler.preemptions,
            draft_runs=scheduler.drafts.runs,
            drafted_tokens=scheduler.drafts.drafted,
            accepted_tokens=scheduler.drafts.accepted,
            selecting_queries=runner.reads.queries,
            pages_selected=runner.reads.selected_by_head,
            frame_hits=frame_hits,
            frame_misses=frame_misses,
            frame_bytes=frame_bytes,
        )
