"""The engine's loop. The steps of a request:

1. `EngineCore.add` checks it and queues it            (engine/scheduler.py: Scheduler.add)
      a grammar is compiled first, in a thread         (engine/grammar.py: GrammarLoader.submit)
2. `EngineCore.step` asks for a plan                   (engine/scheduler.py: Scheduler.schedule)
3. the executor runs the plan                          (runner/runner.py: Runner.launch)
      where all rows decode, a graph does the rest     (runner/graphs.py: DecodeGraphs.run)
      else the plan becomes one ragged batch           (runner/rows.py: Rows.lay_out)
      of a few thousand, the model is a graph as well  (runner/prefill_graphs.py: PrefillGraphs.run)
      each layer attends through its backend           (attention/registry.py: Backends.step)
      the last rows are sampled                        (runner/sampler.py: Sampler.sample)
4. the result is taken in                              (engine/scheduler.py: Scheduler.retire)
5. each token becomes text, or ends the request        (engine/output.py: OutputStream.push)

With overlap the next plan is made and launched (2, 3) before the result is taken in (4, 5), so that
the device never waits for the host. An output that ends has then run one token too many, whose
result is dropped. Only sampling under a grammar waits: the model runs, and the mask of its row
follows once the previous token is known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import NamedTuple

from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.engine import admission
from cairn.engine.admission import CoreShape
from cairn.engine.budget import Load, StepTimes
from cairn.engine.continuation import Continuation, SideBySide
from cairn.engine.drafts import Drafter
from cairn.engine.grammar import GrammarLoader, Words
from cairn.engine.output import OutputStream
from cairn.engine.planned_step import Limits
from cairn.engine.preparing import Need, Preparing
from cairn.engine.request import Moments, Request, State
from cairn.engine.scheduler import Scheduler
from cairn.engine.tokenizer import Tokenizer
from cairn.engine.totals import CoreStats
from cairn.engine.transfer.receiver import Fetched
from cairn.engine.transfer.transfer import Transfers
from cairn.errors import BadRequest, CairnError, InvariantError
from cairn.runner.executor import Executor
from cairn.runner.media import PromptMedia
from cairn.runner.step import Launched, StepPlan, StepResult
from cairn.types import (
    CompletionOutput,
    FinishReason,
    KvTransferParams,
    PromptLogprobs,
    SamplingParams,
)

log = logging.getLogger(__name__)

PREPARING_WAIT = 0.02
"""Seconds that an otherwise idle step waits for grammars and records of requests."""


class _Flight(NamedTuple):
    """A launched step: its plan, and the times at which it was begun, planned and launched."""

    plan: StepPlan
    launched: Launched
    began: float
    planned: float
    ended: float


class EngineCore:
    """Runs requests to their end, one step at a time.

    Args:
        shape: the model's limits.
        limits: rows and slots of a step.
        cache: the pages.
        slots: slot arithmetic.
        executor: runs the plans.
        tokenizer: None: token prompts and token outputs only.
        overlap: plan and launch a step before the result of the previous one is available.
        drafter: guesses the next tokens of rows that decode; None: no speculation.

    Attributes:
        grammars: compiles grammars; None without a tokenizer.
        clock: returns the seconds with which steps and requests are timed.
        times: how long steps take, learned from all that ran.
        transfers: exchanges records with other engines; None: this one works alone.
    """

    def __init__(
        self,
        shape: CoreShape,
        limits: Limits,
        cache: PageCache,
        slots: SlotMap,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        *,
        overlap: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self.shape = shape
        self.cache = cache
        self.executor = executor
        self.tokenizer = tokenizer
        self.overlap = overlap
        self.clock: Callable[[], float] = time.perf_counter
        self.times = StepTimes()
        self.scheduler = Scheduler(limits, cache, slots, self.times, drafter)
        self._eos_ids = frozenset(shape.eos_ids)
        self.grammars = GrammarLoader(tokenizer, shape.vocab_size) if tokenizer else None
        self.stats = CoreStats()
        self._live: dict[str, Continuation] = {}
        self.transfers: Transfers | None = None
        self._preparing = Preparing()
        self._arrivals = 0
        self._flight: _Flight | None = None
        # Whether its grammar masks still have to be set.
        self._choosing = False
        self._together: SideBySide | None = None
        self._landed = 0.0

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished, or a step is in flight."""
        return bool(self._live or self._fetches) or self._flight is not None

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        priority: int = 0,
        media: PromptMedia | None = None,
        transfer: KvTransferParams | None = None,
    ) -> Continuation:
        """Queue continuation `index` of a prompt.

        Args:
            request_id: unique among the live ones.
            prompt: user token ids.
            params: how to sample; `n` is handled by the caller.
            priority: smaller goes first.
            media: images and videos of the prompt.
            transfer: which engine prefills the prompt and which decodes.

        Raises:
            BadRequest: the prompt or the parameters can never be served.
            TooLong: no room for the prompt and one more token.
        """
        self.check(prompt, params)
        self._check_transfer(transfer)
        if request_id in self._live:
            raise BadRequest(f"request id {request_id!r} is in use", "Choose another one")
        room = self.shape.max_model_len - len(prompt)
        max_output = room if params.max_tokens is None else min(params.max_tokens, room)
        eos_ids = frozenset[int]() if params.ignore_eos else self._eos_ids
        output = CompletionOutput(index)
        request = Request(
            id=request_id,
            num_prompt=len(prompt),
            params=params,
            seed=self._seed(params, index),
            stop_ids=admission.stop_ids(params, self.shape),
            # A step that runs the end of a prompt always chooses a token.
            max_output=max(max_output, 1),
            order=(priority, self._arrivals),
            prompt=prompt,
            output=output.token_ids,
            media=media,
        )
        self._arrivals += 1
        stream = OutputStream(output, params, eos_ids, max_output, self.tokenizer, prompt)
        scores = None
        if params.prompt_logprobs is not None:
            decode = None if self.tokenizer is None else self.tokenizer.token_text
            scores = PromptLogprobs(len(prompt), decode)
        continuation = Continuation(request, stream, scores, Moments(self.clock()), asked=transfer)
        self._live[request_id] = continuation
        self._prepare(continuation)
        self.stats.prompt_tokens += len(prompt)
        return continuation

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise BadRequest or TooLong for what can never be served."""
        admission.check(prompt, params, self.shape, self.tokenizer is not None)

    def abort(self, request_id: str) -> None:
        """Abort a request in any state. Unknown ids, as of one that just ended, are ignored."""
        self._part()
        continuation = self._live.pop(request_id, None)
        if continuation is not None:
            continuation.stream.finish(FinishReason.ABORT)
            continuation.moments.ended = self.clock()
            self.scheduler.finish(continuation.request)

    def step(self) -> list[Continuation]:
        """Run one step; returns the continuations that got a token or ended, not to be changed.

        With overlap it launches one step and processes the result of the previous one; the first
        call returns nothing. Steps that depend on which guesses were right wait until that is
        known. If the executor raises, the step's requests end with the reason "error".
        """
        changed = self._join_prepared()
        flight = self._flight
        if flight is None or self.scheduler.can_look_ahead():
            self._flight = self._launch(may_wait=not changed)
            if flight is None:
                self._choose()
                if not self.overlap:
                    flight, self._flight = self._flight, None
        else:
            self._flight = None
        try:
            landed = self._land(flight) if flight is not None else []
            if self.overlap and self._flight is None and self.scheduler.drafter is not None:
                self._flight = self._launch(may_wait=False)
        finally:
            self._choose()
        return [*changed, *landed] if changed else landed

    def settle(self) -> list[Continuation]:
        """Process the step in flight, if any; returns what `step` returns."""
        flight, self._flight = self._flight, None
        return self._land(flight) if flight is not None else []

    def _launch(self, may_wait: bool) -> _Flight | None:
        """Plan a step and start it; None when nothing can run."""
        began = self.clock()
        plan = self.scheduler.schedule()
        if plan is None:
            if self._flight is None:
                if self.scheduler.has_work:
                    raise InvariantError("requests wait, nothing runs and nothing can be scheduled")
                if (self._preparing or self._fetches) and may_wait:
                    wait(
                        [*self._preparing.futures, *self._fetches], PREPARING_WAIT, FIRST_COMPLETED
                    )
            return None
        planned = self.clock()
        for opened in plan.opened:
            moments = self._live[opened.request_id].moments
            moments.started = began if moments.started is None else moments.started
        try:
            launched = self.executor.launch(plan)
        except BaseException as error:
            self._fail(plan, error)
            raise
        self._choosing = bool(plan.constrained)
        return _Flight(plan, launched, began, planned, self.clock())

    def _choose(self) -> None:
        """Set the grammar masks of the step launched last, if it has any: all tokens before it are
        known now."""
        flight = self._flight
        if flight is None or not self._choosing:
            return
        began, self._choosing = self.clock(), False
        masks: dict[int, Words] = {}
        guesses = {work.row: work.guesses for work in flight.plan.work if work.drafts}
        for i, request in self.scheduler.in_flight(flight.plan).constrained.items():
            if request.grammar is not None and self._of(request) is not None:
                along = request.grammar.masks_along(guesses.get(request.row, ()))
                masks |= dict(enumerate(along, i))
        try:
            flight.launched.choose(masks)
        except BaseException as error:
            self._flight = None
            self._fail(flight.plan, error)
            raise
        self._flight = flight._replace(ended=flight.ended + self.clock() - began)

    def _land(self, flight: _Flight) -> list[Continuation]:
        """Wait for a step and process its result."""
        began = self.clock()
        try:
            result = flight.launched.result()
        except BaseException as error:
            self._fail(flight.plan, error)
            raise
        arrived = self.clock()
        load = self.scheduler.in_flight(flight.plan).load
        changed = self._retire(flight.plan, result)
        ended = self.clock()
        # A step launched while the one before ran took what it added to it.
        seconds = ended - max(flight.began, self._landed)
        self._landed = ended
        plan, results = flight.planned - flight.began, ended - arrived
        launch = flight.ended - flight.planned + arrived - began - result.model_seconds
        host = plan + launch + results
        self._account(load, result, seconds, host)
        following = self._flight
        alike = not self.overlap if following is None else not following.plan.work
        if alike and not flight.plan.work:
            other = seconds - result.model_seconds - host
            self.stats.steady.add(plan, launch, results, other)
        return changed

    def _fail(self, plan: StepPlan, error: BaseException) -> None:
        """End the requests of a step that failed."""
        self._part()
        told = error if isinstance(error, CairnError) else CairnError(repr(error))
        for request in self.scheduler.cancel(plan):
            if (failed := self._live.pop(request.id, None)) is not None:
                failed.error, failed.status = f"the step failed: {told}", told.http_status
                failed.stream.finish(FinishReason.ERROR)
                failed.moments.ended = self.clock()

    @property
    def _fetches(self) -> list[Future[Fetched]]:
        """Number of record fetches in progress."""
        return [] if self.transfers is None else self.transfers.running

    def _check_transfer(self, asked: KvTransferParams | None) -> None:
        if asked is not None and self.transfers is not None:
            self.transfers.check(asked)
        elif asked is not None and (asked.do_remote_decode or asked.do_remote_prefill):
            raise BadRequest(
                "kv_transfer_params name another engine, but this one works alone",
                "Start it with --disaggregation-mode, or leave them out",
            )

    def _prepare(self, continuation: Continuation) -> None:
        """Schedule a request once its grammar is compiled and its records are fetched."""
        request, asked, needs = continuation.request, continuation.asked, []
        if request.params.grammar is not None and self.grammars is not None:
            compiled = self.grammars.submit(request.params.grammar, request.stop_ids)
            needs.append(Need(compiled, partial(setattr, request, "grammar")))
        if asked is not None and asked.do_remote_prefill and self.transfers is not None:
            request.state = State.LOADING
            needs.append(Need(self.transfers.fetch(request, asked), self.transfers.arrived))
        if needs:
            self._preparing.add(continuation, needs)
        else:
            self.scheduler.add(request)

    def _join_prepared(self) -> list[Continuation]:
        """Schedule prepared requests; end those whose preparation failed, and return these."""
        if self.transfers is not None:
            self.transfers.poll()
        ready, refused = self._preparing.join()
        for continuation in ready:
            continuation.request.state = State.WAITING
            self.scheduler.add(continuation.request)
        for continuation, error in refused:
            continuation.error = str(error)
            continuation.status = getattr(error, "http_status", continuation.status)
            continuation.stream.finish(FinishReason.ERROR)
            continuation.moments.ended = self.clock()
            del self._live[continuation.request.id]
        return [continuation for continuation, _ in refused]

    def _retire(self, plan: StepPlan, result: StepResult) -> list[Continuation]:
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, result)
        now = self.clock()
        sampled = self.scheduler.retire(plan, result.counts, result.guesses, result.others)
        if not (plan.work or result.selection) and min(result.tokens) >= 0:
            together = self._together
            if together is None or together.requests is not sampled:
                together = self._join(sampled)
            if together is not None:
                return self._retire_together(together, result, now)
        self._part()
        changed, begin = [], 0
        for number, request in enumerate(sampled):
            end = begin + (1 if result.counts is None else result.counts[number])
            self.stats.generated_tokens -= (end - begin) * (request is None)
            continuation = self._of(request)
            if continuation is not None:
                changed.append(continuation)
                self._take_tokens(continuation, result, range(begin, end), now)
            begin = end
        return changed

    def _take_tokens(
        self, continuation: Continuation, result: StepResult, indices: range, now: float
    ) -> None:
        """Append a step's tokens to a continuation, up to the one that ends it."""
        moments = continuation.moments
        for index in indices:
            if result.tokens[index] >= 0:
                moments.last_token = now
                if moments.first_token is None:
                    moments.first_token = now
            if self._take_token(continuation, result, index) is not None:
                self._end(continuation, now)
                return

    def _retire_together(
        self, together: SideBySide, result: StepResult, now: float
    ) -> list[Continuation]:
        """Append each request's token; the fast path for most steps."""
        together.last = now
        ended = together.take(result.tokens, result.logprobs)
        if ended:
            self._part()
            for i in ended:
                self._end(together.continuations[i], now)
        return together.continuations

    def _join(self, requests: Sequence[Request | None]) -> SideBySide | None:
        """`SideBySide` of a step's requests; None where one has ended or has a grammar."""
        self._part()
        found = []
        for request in requests:
            continuation = self._of(request)
            if continuation is None or continuation.request.grammar is not None:
                return None
            found.append(continuation)
        self._together = SideBySide(requests, found, [c.stream for c in found])
        return self._together

    def _part(self) -> None:
        """Leave the `SideBySide` fast path and store each request's time of its last token."""
        if self._together is not None and self._together.last is not None:
            for continuation in self._together.continuations:
                continuation.moments.last_token = self._together.last
        self._together = None

    def _of(self, request: Request | None) -> Continuation | None:
        """The continuation of a request; None if it finished while a step ran it."""
        found = None if request is None else self._live.get(request.id)
        return found if found is not None and found.request is request else None

    def _end(self, continuation: Continuation, now: float) -> None:
        """Finish the request of an output that has ended."""
        continuation.moments.ended = now
        asked, output = continuation.asked, continuation.stream.output
        if asked is not None and asked.do_remote_decode and not output.index:
            assert self.transfers is not None
            continuation.transfer = self.transfers.keep(continuation.request)
        del self._live[continuation.request.id]
        self.scheduler.finish(continuation.request)

    def _take_token(
        self, continuation: Continuation, result: StepResult, index: int
    ) -> FinishReason | None:
        """Pass a token with its reports to the grammar and the stream; returns the finish reason,
        if the output has ended."""
        stream, grammar = continuation.stream, continuation.request.grammar
        token = result.tokens[index]
        if token < 0:
            # No token has a finite probability. A step may be running this one already.
            continuation.request.tokens.append(token)
            continuation.error = "the logits are NaN or infinite"
            if grammar is not None:
                continuation.error += ", or min_tokens forbids all that the grammar allows"
            log.error("request %s: %s", continuation.request.id, continuation.error)
            return stream.finish(FinishReason.ERROR)
        if grammar is not None:
            grammar.accept(token)
        complete = grammar is not None and grammar.done
        selection = result.selection.get(index, ())
        reason = stream.push(token, result.logprobs.get(index), selection, complete)
        if reason is None and grammar is not None and grammar.error is not None:
            continuation.error = f"the output cannot go on: {grammar.error}"
            reason = stream.finish(FinishReason.ERROR)
        return reason

    def _take_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        requests = self.scheduler.in_flight(plan).requests[len(plan.decode.row) :]
        rows = {w.row: request for w, request in zip(plan.work, requests, strict=True)}
        for part in result.prompt_logprobs:
            request = rows[part.row]
            continuation = self._of(request)
            if continuation is not None and continuation.prompt_logprobs is not None:
                first = part.first
                for columns in part.parts:
                    continuation.prompt_logprobs.put(first, columns)
                    first += len(columns)

    def _account(self, load: Load, result: StepResult, seconds: float, host: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.generated_tokens += len(result.tokens)
        stats.prefill_tokens += load.tokens
        stats.decode_tokens += load.rows + load.drafts
        stats.model_seconds += result.model_seconds
        stats.host_seconds += host
        prefill_part = self.times.prefill_part(load, seconds)
        stats.prefill_seconds += prefill_part
        stats.decode_seconds += seconds - prefill_part
        if load.rows:
            stats.decode_stall_seconds += prefill_part
        self.times.observe(load, seconds)

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Seed of a continuation's draws: the user's, or from the engine's and the arrival
        index."""
        if params.seed is not None:
            return params.seed + index
        return (self.shape.seed << 32) + self._arrivals
