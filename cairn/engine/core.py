"""The engine's loop. A request walks through it like this:

1. `EngineCore.add` checks it and queues it            (engine/scheduler.py: Scheduler.add)
2. `EngineCore.step` asks for a plan                   (engine/scheduler.py: Scheduler.schedule)
3. the executor runs the plan                          (runner/runner.py: Runner.run)
      the plan becomes one ragged batch                (runner/rows.py: Rows.build)
      the model attends through its backend            (attention/hsa.py: HsaBackend.run)
      the last rows are sampled                        (runner/sampler.py: Sampler.sample)
4. the result is taken in                              (engine/scheduler.py: Scheduler.retire)
5. each token becomes text, or ends the request        (engine/output.py: OutputStream.push)
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.engine.output import OutputStream, token_logprobs
from cairn.engine.request import Request
from cairn.engine.scheduler import Limits, Scheduler
from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadRequest, InvariantError, TooLong
from cairn.runner.executor import Executor
from cairn.runner.step import StepPlan, StepResult
from cairn.types import CompletionOutput, FinishReason, SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoreShape:
    """What the core knows of the model.

    Attributes:
        vocab_size: user vocabulary.
        max_model_len: longest prompt with its output, in user tokens.
        eos_ids: ids that end an output.
        seed: base of the draws of requests without a seed.
    """

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    seed: int


@dataclass(slots=True)
class CoreStats:
    """Totals since the engine started. Seconds are wall clock.

    `prefill_tokens` and `decode_tokens` ran through the model; `generated_tokens` were sampled.
    `host_seconds` is what a step took beside the model and the sampler.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    model_seconds: float = 0.0
    host_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Continuation:
    """One output of a request while the engine works on it.

    Attributes:
        request: the scheduler's side.
        stream: the user's side: tokens, text, stop conditions.
        prompt_logprobs: one entry per prompt token, the first None; None unless wanted.
    """

    request: Request
    stream: OutputStream
    prompt_logprobs: list[TokenLogprobs | None] | None

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return self.stream.output.finish_reason is not None


class EngineCore:
    """Runs requests to their end, one step at a time.

    Args:
        shape: the model's limits.
        limits: rows and slots of a step.
        cache: the pages.
        slots: slot and landmark arithmetic.
        executor: runs the plans.
        tokenizer: None: token prompts and token outputs only.
    """

    def __init__(
        self,
        shape: CoreShape,
        limits: Limits,
        cache: PageCache,
        slots: SlotMap,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.shape = shape
        self.cache = cache
        self.executor = executor
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(limits, cache, slots)
        self.stats = CoreStats()
        self._live: dict[str, Continuation] = {}
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return bool(self._live)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        priority: int = 0,
    ) -> Continuation:
        """Queue continuation `index` of a prompt.

        Args:
            request_id: unique among the live ones.
            prompt: user token ids.
            params: how to sample; `n` is the caller's business.
            priority: smaller goes first.

        Raises:
            BadRequest: the prompt or the parameters can never be served.
            TooLong: no room for the prompt and one more token.
        """
        self.check(prompt, params)
        if request_id in self._live:
            raise BadRequest(f"request id {request_id!r} is in use", "Choose another one")
        room = self.shape.max_model_len - len(prompt)
        max_output = min(params.max_tokens or room, room)
        eos_ids = () if params.ignore_eos else self.shape.eos_ids
        request = Request(
            id=request_id,
            num_prompt=len(prompt),
            params=params,
            seed=self._seed(params, index),
            stop_ids=self._stop_ids(params),
            max_output=max_output,
            order=(priority, self._arrivals),
            tokens=array("q", prompt),
        )
        self._arrivals += 1
        stream = OutputStream(
            CompletionOutput(index), params, eos_ids, max_output, self.tokenizer, prompt
        )
        wanted = params.prompt_logprobs is not None
        continuation = Continuation(request, stream, [None] * len(prompt) if wanted else None)
        self._live[request_id] = continuation
        self.scheduler.add(request)
        self.stats.prompt_tokens += len(prompt)
        return continuation

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise BadRequest or TooLong for a prompt or parameters that can never be served."""
        vocab, longest = self.shape.vocab_size, self.shape.max_model_len
        if len(prompt) == 0:
            raise BadRequest("the prompt is empty", "Give at least one token")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise BadRequest(
                f"prompt token id {bad} is out of range", f"Ids go from 0 to {vocab - 1}"
            )
        if len(prompt) >= longest:
            raise TooLong(
                f"the prompt has {len(prompt)} tokens, but prompt and output together may have "
                f"{longest} (max_model_len)",
                "Shorten the prompt, or raise max_model_len or kv_cache_memory if the model "
                "and the memory allow it",
            )
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token in ids:
                if token >= vocab:
                    raise BadRequest(
                        f"{name} has token id {token}, out of range",
                        f"Ids go from 0 to {vocab - 1}",
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > vocab:
                raise BadRequest(
                    f"{name} is {count}, but the vocabulary has {vocab} tokens",
                    "Use -1 for the whole vocabulary",
                )
        if params.min_tokens and len(self._stop_ids(params)) >= vocab:
            raise BadRequest(
                f"min_tokens is {params.min_tokens}, but every token id ends the output",
                "Leave some id out of stop_token_ids",
            )
        if params.stop and self.tokenizer is None:
            raise BadRequest(
                f"stop is {params.stop!r}, but this model has no tokenizer", "Use stop_token_ids"
            )

    def abort(self, request_id: str) -> None:
        """Take a request back, whatever its state. An unknown id may just have ended: ignored."""
        continuation = self._live.pop(request_id, None)
        if continuation is not None:
            continuation.stream.finish(FinishReason.ABORT)
            self.scheduler.finish(continuation.request)

    def step(self) -> list[Continuation]:
        """Run one step; returns the continuations that got a token or ended.

        An exception of the executor ends the requests of that step with the reason "error",
        gives their pages back and is raised again.
        """
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            if self.scheduler.has_work:
                raise InvariantError("requests wait, nothing runs and nothing can be scheduled")
            return []
        try:
            result = self.executor.execute(plan)
        except BaseException:
            for request in self.scheduler.cancel(plan):
                failed = self._live.pop(request.id, None)
                if failed is not None:
                    failed.stream.finish(FinishReason.ERROR)
            raise
        changed = self._retire(plan, result)
        self._account(plan, result, time.perf_counter() - began)
        return changed

    def _retire(self, plan: StepPlan, result: StepResult) -> list[Continuation]:
        requests = self.scheduler.requests_of(plan)
        rows = {w.row: request.id for w, request in zip(plan.work, requests, strict=True)}
        self._take_prompt_logprobs(rows, result)
        logprobs = {rows[sampled.row]: sampled.logprobs for sampled in result.sampled}
        changed = []
        for request, token in self.scheduler.retire(plan, result):
            continuation = self._live[request.id]
            changed.append(continuation)
            if token < 0:
                # No token has a finite probability: the model's logits are not numbers.
                log.error("request %s: the logits are NaN or infinite", request.id)
                reason: FinishReason | None = continuation.stream.finish(FinishReason.ERROR)
            else:
                reason = continuation.stream.push(token, logprobs[request.id])
            if reason is not None:
                del self._live[request.id]
                self.scheduler.finish(request)
        return changed

    def _take_prompt_logprobs(self, rows: dict[int, str], result: StepResult) -> None:
        for part in result.prompt_logprobs:
            continuation = self._live.get(rows[part.row])
            if continuation is not None and continuation.prompt_logprobs is not None:
                for i, entry in enumerate(part.entries, start=part.first + 1):
                    continuation.prompt_logprobs[i] = token_logprobs(entry, self.tokenizer)

    def _account(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.generated_tokens += len(result.sampled)
        prefill = sum(work.count for work in plan.work if work.tokens is not None)
        stats.prefill_tokens += prefill
        stats.decode_tokens += plan.num_tokens - prefill
        stats.model_seconds += result.model_seconds
        stats.host_seconds += seconds - result.model_seconds
        # A mixed step's time is shared out by tokens: that is what each would have waited for.
        share = prefill / plan.num_tokens
        stats.prefill_seconds += seconds * share
        stats.decode_seconds += seconds * (1 - share)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Every id that ends an output of these parameters, once. A model may name an
        end-of-sequence id that it cannot produce."""
        eos_ids = () if params.ignore_eos else self.shape.eos_ids
        ids = dict.fromkeys((*eos_ids, *params.stop_token_ids))
        return tuple(token for token in ids if token < self.shape.vocab_size)

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Base of a continuation's draws: the user's seed, or the engine's and the arrival."""
        if params.seed is not None:
            return params.seed + index
        return (self.shape.seed << 32) + self._arrivals
