"""Responses of /v1/chat/completions: reasoning, text and tool calls of the output, separated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from cairn.engine.messages import Delta
from cairn.engine.tokenizer import Tokenizer
from cairn.server.generation import ResponseHead
from cairn.server.logprobs import chat_logprobs, joined_ids, prompt_scores
from cairn.server.protocol.chat import (
    CallFragment,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    FinishReason,
    FunctionFragment,
    GeneratedCall,
    GeneratedFunction,
)
from cairn.server.protocol.common import ChoiceExtras, PromptScore, ReasoningTokens, Usage
from cairn.server.reasoning import ReasoningCounter, ReasoningParser
from cairn.server.reasoning_markers import ReasoningMarkers
from cairn.server.state import ServerState
from cairn.server.tool_parser import CallArguments, CallBegin, CallEnd, Piece, Text, ToolParser
from cairn.types import Grammar


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request's tools are offered to the model and parsed.

    Attributes:
        shown: the tools as the chat template reads them.
        parser: name of the parser of tool calls; None: the output is not parsed for calls.
        grammar: constrains calls to their schemas, and the output to calls if they are required.
        several: the output may have more than one call.
        forced: the output consists of calls only, so a truncated output is a truncated call.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    parser: str | None = None
    grammar: Grammar | None = None
    several: bool = True
    forced: bool = False

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schemas of the functions' arguments, by function name."""
        functions = [tool["function"] for tool in self.shown]
        return {function["name"]: function.get("parameters") or {} for function in functions}


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """How a model's reasoning is separated from its answer.

    Attributes:
        markers: the markers around the reasoning.
        opened: the prompt contains the opening marker, the output begins as reasoning.
        shown: the response includes the reasoning.
    """

    markers: ReasoningMarkers
    opened: bool
    shown: bool


class ChatResponseBuilder:
    """Builds responses of /v1/chat/completions.

    Args:
        state: of the server.
        body: the request.
        prompt: its token ids.
        tools: how its tools are used.
        reasoning: how reasoning is separated, None to leave it in the content.
        tokenizer: spells tokens.
    """

    def __init__(
        self,
        state: ServerState,
        body: ChatRequest,
        prompt: Sequence[int],
        tools: ToolUse,
        reasoning: ReasoningUse | None,
        tokenizer: Tokenizer,
    ) -> None:
        self.head = ResponseHead.new("chatcmpl", state)
        self._body = body
        self._prompt = prompt
        self._scores: list[PromptScore] | UnsetType = UNSET
        self._told_prompt = False
        self._reasoning = reasoning
        self._tools = tools
        self._tokenizer = tokenizer
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._readers: dict[int, _Reader] = {}

    async def push(self, choice: int, delta: Delta) -> list[ChatChunkChoice]:
        """See ResponseBuilder. The first part of a choice gives the role."""
        parts = []
        reader = self._readers.get(choice)
        if reader is None:
            reader = self._readers[choice] = _Reader(self._tools, self._reasoning, self._tokenizer)
            parts.append(ChatChunkChoice(choice, ChatDelta(role="assistant", content="")))
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            self._scores = await asyncio.to_thread(
                prompt_scores,
                self._prompt,
                delta.prompt_logprobs,
                self._body.prompt_logprobs,
                self._tokenizer,
            )
        reasoning, content, calls = reader.read(delta)
        logprobs = None
        if self._top is not None and delta.token_ids:
            by_id = bool(self._body.return_tokens_as_token_ids)
            logprobs = chat_logprobs(
                delta.token_ids, delta.logprobs, self._top, self._tokenizer, by_id
            )
        ids = list(delta.token_ids) if self._body.return_token_ids else UNSET
        part = ChatChunkChoice(
            index=choice,
            delta=ChatDelta(
                content=content or UNSET,
                reasoning_content=reasoning or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=logprobs,
            finish_reason=reader.finish_reason,
            stop_reason=UNSET if reader.finish_reason is None else delta.stop_reason,
            token_ids=ids,
            cairn=ChoiceExtras(list(delta.selection)) if delta.selection else UNSET,
        )
        new = (reasoning, content, calls, logprobs, delta.selection, part.finish_reason)
        if any(new) or (ids is not UNSET and ids):
            parts.append(part)
        return parts

    def over(self, choice: int) -> bool:
        """See ResponseBuilder. Without parallel calls a choice ends with its first call."""
        return self._readers[choice].finish_reason is not None if choice in self._readers else False

    def chunk(self, parts: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        """See ResponseBuilder."""
        ids = self._prompt_ids if not self._told_prompt else UNSET
        self._told_prompt = True
        if isinstance(usage, Usage):
            usage = self._with_reasoning(usage)
        return ChatChunk(**self.head.fields, choices=parts, usage=usage, prompt_token_ids=ids)

    def whole(self, parts: list[list[ChatChunkChoice]], usage: Usage) -> ChatResponse:
        """See ResponseBuilder."""
        return ChatResponse(
            **self.head.fields,
            choices=[joined(each) for each in parts],
            usage=self._with_reasoning(usage),
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._scores,
        )

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices so far."""
        return sum(reader.reasoning_tokens for reader in self._readers.values())

    def _with_reasoning(self, usage: Usage) -> Usage:
        details = ReasoningTokens(self.reasoning_tokens)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    @property
    def _prompt_ids(self) -> list[int] | UnsetType:
        return list(self._prompt) if self._body.return_token_ids else UNSET


class _Reader:
    """Separates the reasoning, text and tool calls of one choice as its output arrives.

    Attributes:
        finish_reason: None while the choice is being generated.
    """

    def __init__(
        self, tools: ToolUse, reasoning: ReasoningUse | None, tokenizer: Tokenizer
    ) -> None:
        self._reasoning: ReasoningParser | None = None
        self._counter: ReasoningCounter | None = None
        self._shows_reasoning = True
        if reasoning is not None:
            self._reasoning = ReasoningParser(reasoning.markers, reasoning.opened)
            self._counter = ReasoningCounter(reasoning.markers, reasoning.opened, tokenizer)
            self._shows_reasoning = reasoning.shown
        self.finish_reason: FinishReason | None = None
        self._parser = ToolParser(tools.parser, tools.schemas) if tools.parser is not None else None
        self._several = tools.several
        self._forced = tools.forced
        self._cut = False
        self._called = False

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens so far, 0 where reasoning is not parsed."""
        return 0 if self._counter is None else self._counter.count

    def read(self, delta: Delta) -> tuple[str, str, list[CallFragment]]:
        """The new reasoning, new text and new fragments of calls in a delta."""
        if self._counter is not None:
            self._counter.add(delta.token_ids)
        reasoning, answer = self._split(delta)
        text: list[str] = []
        calls: list[CallFragment] = []
        for piece in self._pieces(answer, delta.finish_reason):
            match piece:
                case Text():
                    text.append(piece.text)
                case CallBegin():
                    self._called = True
                    name = FunctionFragment(name=piece.name, arguments="")
                    calls.append(CallFragment(piece.index, name, piece.id, "function"))
                case CallArguments():
                    more = FunctionFragment(arguments=piece.fragment)
                    calls.append(CallFragment(piece.index, more))
                case CallEnd() if not (self._several or self._cut):
                    self.finish_reason = "tool_calls"
                    return reasoning, "".join(text), calls
        if delta.finish_reason is not None:
            called = self._called and delta.finish_reason == "stop"
            reason = "tool_calls" if called else delta.finish_reason
            self.finish_reason = cast(FinishReason, reason)
        return reasoning, "".join(text), calls

    def _split(self, delta: Delta) -> tuple[str, str]:
        """What a delta adds to the reasoning and to the answer."""
        if self._reasoning is None:
            return "", delta.text
        reasoning, answer = self._reasoning.feed(delta.text)
        if delta.finish_reason is not None:
            more = self._reasoning.close()
            reasoning, answer = reasoning + more[0], answer + more[1]
        return (reasoning if self._shows_reasoning else ""), answer

    def _pieces(self, answer: str, finish_reason: str | None) -> Sequence[Piece]:
        if self._parser is None:
            return [Text(answer)]
        pieces = list(self._parser.feed(answer))
        if finish_reason is not None:
            self._cut = self._forced and finish_reason == "length"
            complete = finish_reason == "stop"
            pieces += self._parser.cut() if self._cut else self._parser.close(complete)
        return pieces


def joined(parts: Sequence[ChatChunkChoice]) -> ChatChoice:
    """Join the streamed parts of a choice into one choice."""
    text = "".join(part.delta.content or "" for part in parts)
    reasoning = "".join(part.delta.reasoning_content or "" for part in parts)
    calls: dict[int, GeneratedCall] = {}
    for fragment in (call for part in parts for call in part.delta.tool_calls or ()):
        calls[fragment.index] = _extended(calls.get(fragment.index), fragment)
    entries = [part.logprobs for part in parts if part.logprobs is not None]
    read = [part.cairn for part in parts if part.cairn is not UNSET]
    last = parts[-1]
    assert last.finish_reason is not None
    return ChatChoice(
        index=last.index,
        message=ChatAnswer(
            content=None if calls and not text else text,
            reasoning_content=reasoning or UNSET,
            tool_calls=[calls[i] for i in sorted(calls)] or UNSET,
        ),
        logprobs=ChatLogprobs([e for entry in entries for e in entry.content]) if entries else None,
        finish_reason=last.finish_reason,
        stop_reason=None if last.stop_reason is UNSET else last.stop_reason,
        token_ids=joined_ids(parts),
        cairn=ChoiceExtras.joined(read) if read else UNSET,
    )


def _extended(call: GeneratedCall | None, fragment: CallFragment) -> GeneratedCall:
    function = fragment.function
    if call is None:
        name = function.name or ""
        return GeneratedCall(fragment.id or "", GeneratedFunction(name, function.arguments or ""))
    arguments = call.function.arguments + (function.arguments or "")
    return GeneratedCall(call.id, GeneratedFunction(call.function.name, arguments))
