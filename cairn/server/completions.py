"""/v1/completions: continues prompts of text or token ids; `echo` returns their
log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.engine.messages import Delta, Positions
from cairn.server.errors import about
from cairn.server.generation import ResponseHead, Work, answer
from cairn.server.logprobs import LegacyLogprobs, joined_ids, prompt_scores
from cairn.server.protocol.common import ChoiceExtras, PromptScore, Usage
from cairn.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    LegacyFinish,
)
from cairn.server.protocol.explain import BadField
from cairn.server.request_body import encoded, longest_prompt, read_request, tokenizer_of
from cairn.server.sampling import (
    Output,
    requested_grammar,
    requested_transfer,
    sampling_params,
    stream_options,
    truncated,
)
from cairn.server.state import ServerState

DEFAULT_MAX_TOKENS = 16
SCORED_AT_ONCE = 256
"""Prompt tokens whose log-probabilities are converted before the event loop runs other requests."""


async def create_completion(request: Request) -> Response:
    """POST /v1/completions. Raises CairnError for a request that cannot be served."""
    state: ServerState = request.app.state.server
    track = state.metrics.track(request.url.path)
    body = await read_request(request, CompletionRequest)
    streaming = stream_options(body)
    output = await _output(state, body)
    params = sampling_params(body, output, state.options, state.sampling_defaults)
    given = _prompts(body, state)
    with about("prompt"):
        prompts = await encoded(request, lambda: [_encode(state, body, one) for one in given])
    work = Work(
        prompts=[prompt.ids for prompt in prompts],
        params=params,
        priority=body.priority or 0,
        field="prompt",
        transfer=requested_transfer(body, len(prompts)),
    )
    return await answer(
        request, work, CompletionResponseBuilder(state, body, prompts), track, streaming
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt.

    Attributes:
        ids: its token ids.
        text: its text if the response echoes it, else empty.
    """

    ids: Sequence[int]
    text: str


class CompletionResponseBuilder:
    """Builds responses of /v1/completions.

    Args:
        state: of the server.
        body: the request.
        prompts: those of the request, encoded.
    """

    def __init__(
        self, state: ServerState, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        self.head = ResponseHead.new("cmpl", state)
        self._tokenizer = state.tokenizer
        self._prompts = prompts
        self._n = body.n or 1
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._body = body
        self._prompt_lists: dict[int, list[PromptScore]] = {}
        self._scores: dict[int, LegacyLogprobs] = {}
        self._begun: set[int] = set()
        self._prompt_scores: dict[int, CompletionLogprobs] = {}
        self._held: dict[int, list[tuple[int, Delta]]] = {}

    async def push(self, choice: int, delta: Delta) -> list[CompletionChoice]:
        """See ResponseBuilder. With `echo`, deltas are held until the prompt has been scored."""
        at = choice // self._n
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            self._prompt_lists[at] = await asyncio.to_thread(
                prompt_scores,
                self._prompts[at].ids,
                delta.prompt_logprobs,
                self._body.prompt_logprobs,
                self._tokenizer,
            )
        if not self._echo or self._logprobs is None or at in self._prompt_scores:
            return [self._part(choice, delta)]
        if delta.prompt_logprobs is None:
            self._held.setdefault(at, []).append((choice, delta))
            return []
        self._prompt_scores[at] = await self._score_prompt(at, delta.prompt_logprobs)
        return [self._part(*pair) for pair in ((choice, delta), *self._held.pop(at, ()))]

    def over(self, choice: int) -> bool:
        """See ResponseBuilder. A completion never ends before the engine's output."""
        return False

    def chunk(
        self, parts: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> CompletionResponse:
        """See ResponseBuilder."""
        return CompletionResponse(**self.head.fields, choices=parts, usage=usage)

    def whole(self, parts: list[list[CompletionChoice]], usage: Usage) -> CompletionResponse:
        """See ResponseBuilder."""
        choices = [joined(each) for each in parts]
        if self._prompt_lists:
            choices = [
                msgspec.structs.replace(
                    choice, prompt_logprobs=self._prompt_lists[choice.index // self._n]
                )
                for choice in choices
            ]
        return self.chunk(choices, usage)

    async def _score_prompt(self, at: int, parts: Sequence[Positions]) -> CompletionLogprobs:
        """Log-probabilities of a prompt. Converted in pieces, to keep the event loop free."""
        assert self._logprobs is not None
        by_id = bool(self._body.return_tokens_as_token_ids)
        scores = LegacyLogprobs(self._tokenizer, (), 0, self._logprobs, by_id)
        ids, positions = self._prompts[at].ids, chain((None,), *parts)
        pieces = []
        for begin in range(0, len(ids), SCORED_AT_ONCE):
            piece = ids[begin : begin + SCORED_AT_ONCE]
            pieces.append(scores.take(piece, list(islice(positions, len(piece)))))
            await asyncio.sleep(0)
        return joined_lists(pieces)

    def _part(self, choice: int, delta: Delta) -> CompletionChoice:
        prompt = self._prompts[choice // self._n]
        first = choice not in self._begun
        self._begun.add(choice)
        return CompletionChoice(
            index=choice,
            text=prompt.text + delta.text if first else delta.text,
            logprobs=self._score(choice, delta, first),
            finish_reason=cast("LegacyFinish | None", delta.finish_reason),
            stop_reason=delta.stop_reason,
            token_ids=list(delta.token_ids) if self._body.return_token_ids else UNSET,
            prompt_token_ids=(list(prompt.ids) if self._body.return_token_ids and first else UNSET),
            cairn=ChoiceExtras(list(delta.selection)) if delta.selection else UNSET,
        )

    def _score(self, choice: int, delta: Delta, first: bool) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        at = choice // self._n
        prompt = self._prompts[at]
        if first:
            self._scores[choice] = LegacyLogprobs(
                self._tokenizer,
                prompt.ids,
                len(prompt.text),
                self._logprobs,
                bool(self._body.return_tokens_as_token_ids),
                self._body.skip_special_tokens is False,
            )
        new = self._scores[choice].take(delta.token_ids, delta.logprobs)
        return joined_lists([self._prompt_scores[at], new]) if first and self._echo else new


def joined(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    """Join the streamed parts of a choice into one choice."""
    scores = [part.logprobs for part in parts if part.logprobs is not None]
    read = [part.cairn for part in parts if part.cairn is not UNSET]
    last = parts[-1]
    return CompletionChoice(
        index=last.index,
        text="".join(part.text for part in parts),
        logprobs=joined_lists(scores) if scores else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=joined_ids(parts),
        prompt_token_ids=parts[0].prompt_token_ids,
        cairn=ChoiceExtras.joined(read) if read else UNSET,
    )


def joined_lists(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Concatenate consecutive log-probability lists."""
    return CompletionLogprobs(
        tokens=list(chain.from_iterable(part.tokens for part in parts)),
        token_logprobs=list(chain.from_iterable(part.token_logprobs for part in parts)),
        top_logprobs=list(chain.from_iterable(part.top_logprobs for part in parts)),
        text_offset=list(chain.from_iterable(part.text_offset for part in parts)),
    )


async def _output(state: ServerState, body: CompletionRequest) -> Output:
    if body.max_tokens == 0 and not body.echo:
        raise BadField("max_tokens", "max_tokens is 0 and echo is off: nothing to answer")
    if body.max_tokens == 0 and body.min_tokens:
        raise BadField("min_tokens", f"min_tokens is {body.min_tokens}, but max_tokens is 0")
    named = requested_grammar(body)
    if named is not None:
        with about(named[0]):
            await state.grammars.check(named[1])
    return Output(
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        grammar=named[1] if named is not None else None,
    )


def _prompts(body: CompletionRequest, state: ServerState) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [cast(list[int], prompt)]
    if any(isinstance(item, int) for item in prompt):
        raise BadField(
            "prompt", "prompt mixes token ids with prompts", "Give a list of lists of token ids"
        )
    limit = state.options.max_prompts
    if len(prompt) > limit:
        raise BadField(
            "prompt", f"prompt holds {len(prompt)} prompts, but this server allows {limit}"
        )
    return cast(list[str | list[int]], prompt)


def _encode(state: ServerState, body: CompletionRequest, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        tokenizer = tokenizer_of(state, "a text prompt")
        longest = longest_prompt(state, body.max_tokens)
        limit = longest if body.truncate_prompt_tokens is None else None
        ids = tokenizer.encode(prompt, special, limit=limit)
        kept = truncated(ids, body, longest)
        text = prompt if len(kept) == len(ids) else tokenizer.decode(kept)
        return Prompt(kept, text if body.echo else "")
    if body.add_special_tokens is not None:
        raise BadField(
            "add_special_tokens", "add_special_tokens goes with text prompts only", "Leave it out"
        )
    prompt = list(truncated(prompt, body, longest_prompt(state, body.max_tokens)))
    shown = bool(body.echo) and state.tokenizer is not None
    return Prompt(prompt, state.tokenizer.decode(prompt) if shown and state.tokenizer else "")


routes = [Route("/v1/completions", create_completion, methods=["POST"])]
