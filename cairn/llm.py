"""LLM: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cairn.config import EngineConfig, EngineOptions, default_model_path
from cairn.engine.build import Built, build
from cairn.engine.continuation import Continuation
from cairn.engine.media.given import Given, of_data, taken_out
from cairn.engine.media.reader import MediaReader
from cairn.engine.recommended import recommended_sampling
from cairn.engine.tokenizer import Tokenizer
from cairn.engine.totals import HostTimes
from cairn.errors import BadRequest
from cairn.names import refuse_unknown
from cairn.obs.progress import Progress
from cairn.runner.media import PromptMedia
from cairn.specs.model import ModelSpec
from cairn.types import RequestOutput, SamplingParams

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]

MEDIA = "multi_modal_data"
PROMPT_KEYS = ("prompt", "prompt_token_ids", MEDIA)
NEVER = (1 << 31) - 1
"""Threshold of the garbage collector's oldest generation that disables full collections."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the engine started.

    Attributes:
        steps: forward passes.
        prompt_tokens: user tokens of all prompts.
        cached_prompt_tokens: prompt tokens read from the prefix cache.
        prefill_tokens, decode_tokens: user tokens that were computed.
        generated_tokens: sampled tokens.
        prefill_seconds, decode_seconds: wall time of the steps. The time of a mixed step beyond the
            expected time of its decoding rows counts as prefill.
        model_seconds: time of the model and the sampler.
        host_seconds: the rest of the steps' time.
        queries: queries of landmark layers, landmarks included.
        pages_read: pages that they read (selected and window), averaged over KV heads.
        pages_held: pages that dense attention would have read.
        preemptions: how often a running request lost its pages to others.
        draft_runs, drafted_tokens, accepted_tokens: totals of speculative decoding, see
            `cairn.engine.drafts.DraftTotals`.
        steady: host times of steps that only decode.
        frame_hits, frame_misses: host tier: selected pages, per KV head, that were in frames on the
            device, and that were fetched from host memory.
    """

    steps: int
    prompt_tokens: int
    cached_prompt_tokens: int
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    model_seconds: float
    host_seconds: float
    queries: int
    pages_read: int
    pages_held: int
    preemptions: int
    draft_runs: int
    drafted_tokens: int
    accepted_tokens: int
    steady: HostTimes
    frame_hits: int = 0
    frame_misses: int = 0


class LLM:
    """An engine with a loaded model.

    Args:
        model: folder with config.json, safetensors and (for text) a tokenizer; or a GGUF file;
            None for the model of the package.
        options: fields of `cairn.config.EngineOptions`.

    Raises:
        BadRequest: an unknown option; the message suggests the nearest name.
        BadModel, BadConfig, OutOfMemory: see `cairn.engine.build.build`.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        refuse_unknown("LLM", options, [f.name for f in fields(EngineOptions)])
        path = default_model_path() if model is None else Path(model)
        self._path = path
        self._built = build(path, EngineOptions(**options))
        self._core, spec = self._built.core, self._built.spec
        media = None if spec.vision is None else spec.vision.media
        self._media = MediaReader(media, self._built.config.media, self._core.tokenizer)
        self._count = 0

    @property
    def spec(self) -> ModelSpec:
        """The model's geometry."""
        return self._built.spec

    @property
    def engine_config(self) -> EngineConfig:
        """The resolved options."""
        return self._built.config

    @cached_property
    def default_params(self) -> SamplingParams:
        """Default sampling parameters, from the model's generation_config.json.

        Raises:
            BadModel: the file has an invalid value.
        """
        return SamplingParams(**recommended_sampling(self._path))

    @property
    def engine(self) -> Built:
        """The engine's components, for tools that inspect them."""
        return self._built

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer. Without one, prompts and outputs are token ids
        only."""
        return self._core.tokenizer is not None

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt and output together, in user tokens."""
        return self._built.memory.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for prompts, in their order.

        Args:
            prompts: one prompt or a list. A prompt is a text, `{"prompt": text}` or
                `{"prompt_token_ids": [...]}`. For models with a vision encoder it may have
                `"multi_modal_data": {"image": ..., "video": ...}`: an image is a Pillow image, the
                bytes of a file, a URL or uint8 [height, width, 3]; a video is a list of images,
                uint8 [frames, height, width, 3] or `(video, {"fps": 24})`; a list holds several.
                The prompt has one placeholder token for each.
            sampling_params: one for all prompts, or one per prompt; None for `default_params`.
            use_tqdm: show progress bars (on a terminal).
            priority: one value per prompt; smaller values are scheduled first.

        Raises:
            BadRequest: an invalid prompt or parameter. Nothing has been generated then.
            TooLong: a prompt exceeds the model's context or the page pool.
        """
        given = _listed(prompts)
        params = self._params(sampling_params, len(given))
        order = list(priority) if priority is not None else [0] * len(given)
        if len(order) != len(given):
            raise BadRequest(f"{len(order)} priorities for {len(given)} prompts")
        with _uncollected():
            jobs = self._submit_all(self._encode(given), params, order)
            total = sum(job.num_prompt for job in jobs)
            with Progress(total, enabled=use_tqdm) as progress:
                try:
                    for _ in self._run(jobs, progress):
                        pass
                finally:
                    self._abort(jobs)
            return [job.result() for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the assistant's next message in one conversation, or in each of several.

        For models with a vision encoder, content may have parts
        {"type": "image_url", "image_url": {"url": ...}}, or of type "image" and "video" with the
        values that `generate` accepts.

        Raises:
            BadRequest: a message without role or content, or a model without tokenizer.
        """
        if not messages:
            raise BadRequest("messages is empty", "Give at least one message")
        one = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [self._chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _chat_prompt(self, conversation: Sequence[Message]) -> Prompt:
        """Render a conversation to a prompt."""
        messages, given = taken_out(conversation)
        self._media.check(given)
        ids = self._tokenizer().apply_chat(messages, placeholders=self._media.placeholders)
        return {"prompt_token_ids": ids, MEDIA: given} if given else {"prompt_token_ids": ids}

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[str, RequestOutput]]:
        """Generate for one prompt. Yields (new text, result so far) after each step with new
        tokens.

        The concatenated pieces are the text of the result. Closing the iterator aborts the request.

        Raises:
            BadRequest: as `generate`; also for n > 1.
        """
        params = sampling_params or self.default_params
        if params.n != 1:
            raise BadRequest(f"n is {params.n}, but a stream has one continuation", "Use generate")
        [encoded] = self._encode([prompt])
        self._check(encoded.ids, params)
        job = self._submit(encoded, params, 0)
        told = False
        try:
            part = job.parts[0]
            for changed in self._run([job], None):
                if part in changed:
                    # Read before `yield`: the caller may call another method, which steps the
                    # engine and finishes this output.
                    told = part.finished
                    yield part.stream.take(), job.result()
            if not told:
                yield part.stream.take(), job.result()
        finally:
            self._abort([job])

    def stats(self) -> Stats:
        """Totals since the engine started."""
        core, runner = self._core.stats, self._built.runner
        drafts = self._core.scheduler.drafts
        known = {f.name for f in fields(Stats)}
        totals = {f.name: getattr(core, f.name) for f in fields(core) if f.name in known}
        totals["steady"] = replace(core.steady)
        frame_hits, frame_misses, _ = runner.pools.frame_traffic()
        return Stats(
            **totals,
            queries=runner.reads.queries,
            pages_read=int(runner.reads.selected_by_head) + runner.reads.window,
            pages_held=runner.reads.held,
            cached_prompt_tokens=self._core.scheduler.cached_prompt_tokens,
            preemptions=self._core.scheduler.preemptions,
            frame_hits=frame_hits,
            frame_misses=frame_misses,
            draft_runs=drafts.runs,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
        )

    def shutdown(self) -> None:
        """Free the model and its pages. The object cannot be used afterwards."""
        self._core.executor.shutdown()
        del self._built, self._core

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            return [self.default_params] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
            raise BadRequest(
                f"sampling_params must be SamplingParams or a list of them, not {given!r}"
            )
        if len(given) != count:
            raise BadRequest(f"{len(given)} sampling_params for {count} prompts")
        return list(given)

    def _encode(self, prompts: Sequence[Prompt]) -> list[_Encoded]:
        """Encode the prompts."""
        parts = [self._text_or_ids(prompt) for prompt in prompts]
        texts = [part for part in parts if isinstance(part, str)]
        encoded = iter(self._tokenizer().encode_all(texts) if texts else ())
        found = []
        for prompt, part in zip(prompts, parts, strict=True):
            ids: Sequence[int] = next(encoded) if isinstance(part, str) else part
            media = None
            if isinstance(prompt, Mapping) and prompt.get(MEDIA) is not None:
                given = prompt[MEDIA]
                listed = isinstance(given, list) and all(isinstance(one, Given) for one in given)
                ids, media = self._media.read(ids, given if listed else of_data(given))
            found.append(_Encoded(part if isinstance(part, str) else None, ids, media))
        return found

    def _text_or_ids(self, prompt: Prompt) -> str | list[int]:
        if isinstance(prompt, Mapping):
            refuse_unknown("a prompt", prompt, PROMPT_KEYS)
            if "prompt_token_ids" in prompt:
                return _checked_ids(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt", "")
        if not isinstance(prompt, str):
            raise BadRequest(
                f"a prompt must be text or a mapping, not {type(prompt).__name__}",
                'Use a string, {"prompt": text} or {"prompt_token_ids": [...]}',
            )
        return prompt

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._core.tokenizer
        if tokenizer is None:
            raise BadRequest(
                "this model has no tokenizer", 'Use generate with {"prompt_token_ids": [...]}'
            )
        return tokenizer

    def _check(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the errors of `generate`, also for a grammar that cannot be compiled."""
        self._core.check(ids, params)
        if params.grammar is not None and self._core.grammars is not None:
            self._core.grammars.compile(params.grammar)

    def _submit_all(
        self,
        encoded: list[_Encoded],
        params: list[SamplingParams],
        order: Sequence[int],
    ) -> list[_Job]:
        """Check all prompts, then queue them.

        Their ids are kept as the engine's arrays, because Python's garbage collector would traverse
        the lists of long prompts during the steps.
        """
        for one, param in zip(encoded, params, strict=True):
            self._check(one.ids, param)
        return [
            self._submit(one, param, level)
            for one, param, level in zip(encoded, params, order, strict=True)
        ]

    def _submit(self, prompt: _Encoded, params: SamplingParams, priority: int) -> _Job:
        self._count += 1
        name = f"request-{self._count}"
        # Prompt log-probabilities are equal for all outputs, so only the first computes them.
        others = replace(params, prompt_logprobs=None)
        parts = [
            self._core.add(
                f"{name}.{i}",
                prompt.ids,
                params if i == 0 else others,
                index=i,
                priority=priority,
                media=prompt.media,
            )
            for i in range(params.n)
        ]
        return _Job(name, prompt.text, parts)

    def _run(self, jobs: list[_Job], progress: Progress | None) -> Iterator[list[Continuation]]:
        """Step until the jobs are done. Yields the outputs with new tokens after every step."""
        left = [part for job in reversed(jobs) for part in reversed(job.parts)]
        before = replace(self._core.stats)
        while left:
            yield self._core.step()
            if progress is not None and progress.enabled:
                stats, scheduler = self._core.stats, self._core.scheduler
                progress.update(
                    prefilled=stats.prefill_tokens - before.prefill_tokens,
                    generated=stats.generated_tokens - before.generated_tokens,
                    running=len(scheduler.running),
                    waiting=len(scheduler.waiting),
                )
            while left and left[-1].finished:
                left.pop()

    def _abort(self, jobs: list[_Job]) -> None:
        for job in jobs:
            for part in job.parts:
                if not part.finished:
                    self._core.abort(part.request.id)
        self._core.settle()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Context manager: disable full garbage collections, which generated outputs trigger.

    A full collection traverses all objects of PyTorch, which takes 0.2 s, as long as a hundred
    steps. Steps create no reference cycles that it could free.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


class _Encoded(NamedTuple):
    """An encoded prompt.

    Attributes:
        text: its text, None for a prompt of token ids.
        ids: its token ids.
        media: its images and videos, None without any.
    """

    text: str | None
    ids: Sequence[int]
    media: PromptMedia | None


@dataclass(slots=True)
class _Job:
    """A prompt with its outputs."""

    name: str
    text: str | None
    parts: list[Continuation]
    _ids: list[int] | None = None

    @property
    def num_prompt(self) -> int:
        """User tokens of the prompt."""
        return self.parts[0].request.num_prompt

    @property
    def ids(self) -> list[int]:
        """The prompt's ids as a list, converted at the first call."""
        if self._ids is None:
            self._ids = self.parts[0].request.tokens[: self.num_prompt].tolist()
        return self._ids

    def result(self) -> RequestOutput:
        """The result so far."""
        first = self.parts[0]
        return RequestOutput(
            request_id=self.name,
            prompt=self.text,
            prompt_token_ids=self.ids,
            prompt_logprobs=first.prompt_logprobs,
            outputs=[part.stream.output for part in self.parts],
            finished=all(part.finished for part in self.parts),
            num_cached_tokens=first.request.cached or 0,
        )


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Convert one prompt or several to a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise BadRequest(
            f"prompts must be a prompt or a list of them, not {type(prompts).__name__}",
            'Use a string, {"prompt": text} or {"prompt_token_ids": [...]}',
        )
    return list(prompts)


def _checked_ids(ids: Any) -> list[int]:
    """Convert token ids to a list of integers. Raises BadRequest for anything else."""
    found = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise BadRequest(f"prompt_token_ids must be a list of integers, not {type(ids).__name__}")
    if set(map(type, found)) - {int}:
        for token in found:
            if isinstance(token, bool) or not isinstance(token, int):
                raise BadRequest(f"prompt_token_ids must hold integers, not {token!r}")
    return found if isinstance(found, list) else list(found)


LLM.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        *(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
            for f in fields(EngineOptions)
        ),
    ]
)
