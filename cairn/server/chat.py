"""/v1/chat/completions: a conversation in, the assistant's message or its tool calls out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.engine.chat_template import TemplateInput
from cairn.engine.messages import Delta
from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadRequest
from cairn.server.errors import about
from cairn.server.generation import Head, Work, answer
from cairn.server.intake import (
    at_once_if_short,
    encoded,
    longest_prompt,
    read_request,
    tokenizer_of,
)
from cairn.server.logprobs import chat_logprobs
from cairn.server.protocol.chat import (
    CalledFunction,
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
    MadeCall,
    NamedTool,
    Tool,
)
from cairn.server.protocol.common import ChoiceExtras, Usage
from cairn.server.protocol.fields import BadField
from cairn.server.protocol.tokens import TokenizeRequest
from cairn.server.sampling import (
    Output,
    field_named_by,
    requested_grammar,
    sampling_params,
    stream_options,
    within,
)
from cairn.server.state import ServerState
from cairn.server.tool_grammars import arguments_schema, strict_grammar, tool_grammar
from cairn.server.tools import (
    CallArguments,
    CallBegin,
    Piece,
    Text,
    ToolParser,
    choose_parser,
)
from cairn.types import Grammar


async def create_chat_completion(request: Request) -> Response:
    """POST /v1/chat/completions. Raises CairnError for what cannot be served."""
    state: ServerState = request.app.state.server
    track = state.metrics.track(request.url.path)
    asked = await read_request(request, ChatRequest)
    streaming = stream_options(asked)
    work, shape = await prepared(request, asked)
    return await answer(request, work, shape, track, streaming)


async def prepared(request: Request, asked: ChatRequest) -> tuple[Work, ChatShape]:
    """A chat as work for the engine, and how its answer is written. Raises CairnError."""
    state: ServerState = request.app.state.server
    tokenizer = tokenizer_of(state, "a chat")
    try:
        tools = await encoded(request, lambda: tool_use(state, asked, tokenizer))
        grammar = await _grammar(state, asked, tools)
    except BadRequest as error:
        if error.param == "tools":
            # One grammar is made of all tools: its error does not say which one is at fault.
            await _check_tools(state, asked)
        raise
    params = sampling_params(
        asked, _output(state, asked, grammar), state.options, state.sampling_defaults
    )
    prompt = await encode_chat(request, tokenizer, asked, tools.shown, longest_prompt(state))
    work = Work([prompt], params, asked.priority or 0, "messages")
    return work, ChatShape(state, asked, tools, tokenizer)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request's tools are offered to the model and parsed.

    Attributes:
        shown: the tools as the chat template reads them.
        parser: name of the parser that finds calls in the output; None: none is looked for.
        grammar: makes the output a call, where one is asked for; holds calls to their schemas.
        several: more than one call may be made.
        forced: the whole output is calls: what was cut off is one as well.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    parser: str | None = None
    grammar: Grammar | None = None
    several: bool = True
    forced: bool = False

    @property
    def names(self) -> list[str]:
        """Of the functions."""
        return [tool["function"]["name"] for tool in self.shown]


def tool_use(state: ServerState, asked: ChatRequest, tokenizer: Tokenizer) -> ToolUse:
    """How the model may use the request's tools.

    Raises BadRequest when the tools and the choice among them do not go together.
    """
    tools, choice = asked.tools or [], asked.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools and choice not in (None, "none", "auto"):
        raise BadField("tool_choice", "tool_choice asks for tools, but there are none")
    if named is not None and all(tool.function.name != named for tool in tools):
        raise BadField("tool_choice", f"tool_choice names {named!r}, which is none of the tools")
    if not tools or choice == "none":
        return ToolUse()
    with about("tools"):
        parser = choose_parser(state.options.tool_parser, tokenizer.chat_template)
        shown = shown_tools(tools)
        several = asked.parallel_tool_calls is not False
        if choice in (None, "auto"):
            strict = any(tool.function.strict for tool in tools)
            held = strict_grammar(msgspec.to_builtins(tools), parser) if strict else None
            return ToolUse(shown, parser, held, several)
        callable_ = [tool for tool in shown if named in (None, tool["function"]["name"])]
        # Without an end-of-sequence id the model would emit calls until max_tokens.
        more = several and named is None and bool(state.client.info.eos_ids)
        grammar = tool_grammar(callable_, "required", parser, several=more)
    return ToolUse(shown, parser, grammar, several, forced=True)


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates print them; `strict` and hints for caches are the server's business."""
    shown: list[dict[str, Any]] = msgspec.to_builtins(tools)
    for tool in shown:
        tool.pop("cache_control", None)
        for name in ("strict", "cache_control"):
            tool["function"].pop(name, None)
    return shown


async def encode_chat(
    request: Request,
    tokenizer: Tokenizer,
    asked: ChatRequest | TokenizeRequest,
    tools: Sequence[Mapping[str, Any]],
    limit: int | None = None,
) -> list[int]:
    """Token ids of a conversation.

    Raises BadRequest, TooLong, BadModel, Busy: see Tokenizer.chat_input, Tokenizer.encode and
    TemplateRenderer.render.
    """
    state: ServerState = request.app.state.server

    def chat_input() -> TemplateInput | str:
        messages: list[dict[str, Any]] = msgspec.to_builtins(asked.messages or [])
        variables = asked.chat_template_kwargs
        if isinstance(asked, ChatRequest) and asked.reasoning_effort is not None:
            variables = _reasoning(asked.reasoning_effort, tokenizer.chat_template or "") | (
                variables or {}
            )
        return tokenizer.chat_input(
            messages,
            tools,
            variables,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=bool(asked.continue_final_message),
        )

    try:
        given = await encoded(request, chat_input)
        rendered = not isinstance(given, str)
        text = given if isinstance(given, str) else await state.templates.render(given)
        # A template can make a long text of a short request.
        return await at_once_if_short(
            len(text), lambda: tokenizer.encode(text, not rendered, limit=limit)
        )
    except BadRequest as error:
        error.param = error.param or field_named_by(error, type(asked)) or "messages"
        raise


def _reasoning(effort: str, template: str) -> dict[str, Any]:
    """What a template is told of the reasoning effort."""
    variables: dict[str, Any] = {}
    if re.search(r"\breasoning_effort\b", template):
        variables["reasoning_effort"] = effort
    if effort == "none" and re.search(r"\benable_thinking\b", template):
        variables["enable_thinking"] = False
    return variables


class ChatShape:
    """Answers of /v1/chat/completions.

    Args:
        state: of the server.
        asked: the request.
        tools: what its tools come to.
        tokenizer: spells tokens.
    """

    def __init__(
        self, state: ServerState, asked: ChatRequest, tools: ToolUse, tokenizer: Tokenizer
    ) -> None:
        self.head = Head.new("chatcmpl", state)
        self._tools = tools
        self._tokenizer = tokenizer
        self._top = (asked.top_logprobs or 0) if asked.logprobs else None
        self._readers: dict[int, _Reader] = {}

    async def push(self, choice: int, delta: Delta) -> list[ChatChunkChoice]:
        """See Shape. The first part says the role, later ones what is new."""
        parts = []
        reader = self._readers.get(choice)
        if reader is None:
            reader = self._readers[choice] = _Reader(self._tools)
            parts.append(ChatChunkChoice(choice, ChatDelta(role="assistant", content="")))
        content, calls = reader.read(delta)
        logprobs = None
        if self._top is not None and delta.token_ids:
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._top, self._tokenizer)
        part = ChatChunkChoice(
            index=choice,
            delta=ChatDelta(content=content or UNSET, tool_calls=calls or UNSET),
            logprobs=logprobs,
            finish_reason=reader.finish_reason,
            stop_reason=UNSET if reader.finish_reason is None else delta.stop_reason,
            cairn=ChoiceExtras(list(delta.selection)) if delta.selection else UNSET,
        )
        if content or calls or logprobs or delta.selection or part.finish_reason:
            parts.append(part)
        return parts

    def over(self, choice: int) -> bool:
        """See Shape: a choice may end with its first call."""
        return self._readers[choice].finish_reason is not None if choice in self._readers else False

    def chunk(self, parts: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        """See Shape."""
        return ChatChunk(**self.head.fields, choices=parts, usage=usage)

    def whole(self, parts: list[list[ChatChunkChoice]], usage: Usage) -> ChatResponse:
        """See Shape."""
        choices = [joined(each) for each in parts]
        return ChatResponse(**self.head.fields, choices=choices, usage=usage)


class _Reader:
    """One choice while it grows: text and calls apart.

    Attributes:
        finish_reason: why it has ended; None while it has not.
    """

    def __init__(self, tools: ToolUse) -> None:
        self.finish_reason: FinishReason | None = None
        self._parser = ToolParser(tools.parser, tools.names) if tools.parser is not None else None
        self._several = tools.several
        self._forced = tools.forced
        self._cut = False
        self._called = False

    def read(self, delta: Delta) -> tuple[str, list[CallFragment]]:
        """New text and new pieces of calls."""
        text: list[str] = []
        calls: list[CallFragment] = []
        for piece in self._pieces(delta):
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
                    if not (self._several or self._cut):
                        # A call is sent when it is complete.
                        self.finish_reason = "tool_calls"
                        return "".join(text), calls
        if delta.finish_reason is not None:
            called = self._called and delta.finish_reason == "stop"
            reason = "tool_calls" if called else delta.finish_reason
            self.finish_reason = cast(FinishReason, reason)
        return "".join(text), calls

    def _pieces(self, delta: Delta) -> Sequence[Piece]:
        if self._parser is None:
            return [Text(delta.text)]
        pieces = list(self._parser.feed(delta.text))
        if delta.finish_reason is not None:
            self._cut = self._forced and delta.finish_reason == "length"
            complete = delta.finish_reason == "stop"
            pieces += self._parser.cut() if self._cut else self._parser.close(complete)
        return pieces


def joined(parts: Sequence[ChatChunkChoice]) -> ChatChoice:
    """One choice from the parts of its stream."""
    text = "".join(part.delta.content or "" for part in parts)
    calls: dict[int, MadeCall] = {}
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
            tool_calls=[calls[i] for i in sorted(calls)] or UNSET,
        ),
        logprobs=ChatLogprobs([e for entry in entries for e in entry.content]) if entries else None,
        finish_reason=last.finish_reason,
        stop_reason=None if last.stop_reason is UNSET else last.stop_reason,
        cairn=ChoiceExtras.joined(read) if read else UNSET,
    )


def _extended(call: MadeCall | None, fragment: CallFragment) -> MadeCall:
    function = fragment.function
    if call is None:
        name = function.name or ""
        return MadeCall(fragment.id or "", CalledFunction(name, function.arguments or ""))
    arguments = call.function.arguments + (function.arguments or "")
    return MadeCall(call.id, CalledFunction(call.function.name, arguments))


async def _grammar(state: ServerState, asked: ChatRequest, tools: ToolUse) -> Grammar | None:
    named = requested_grammar(asked)
    if named is not None and tools.shown:
        if named[0] != "response_format":
            raise BadField(
                named[0],
                f"{named[0]} and tools cannot go together: the output would not be a call",
                "Leave one out, or set tool_choice to 'none'",
            )
        # With a forced tool call the output has no free answer for response_format to constrain.
        if not tools.forced:
            with about(named[0]):
                await state.grammars.check(named[1])
            with about("tools"):
                tools = replace(tools, grammar=_calls_or_answer(state, tools, named[1]))
    if tools.grammar is not None:
        named = ("tools", tools.grammar)
    if named is None:
        return None
    with about(named[0]):
        await state.grammars.check(named[1])
    return named[1]


def _calls_or_answer(state: ServerState, tools: ToolUse, answer: Grammar) -> Grammar:
    """Calls of the tools, or an answer that follows a JSON schema."""
    assert tools.parser is not None
    more = tools.several and bool(state.client.info.eos_ids)
    schema = msgspec.json.decode(answer.text)
    grammar = tool_grammar(tools.shown, "required", tools.parser, several=more, answer=schema)
    assert grammar is not None
    return grammar


async def _check_tools(state: ServerState, asked: ChatRequest) -> None:
    """Raise BadField for the first tool whose parameters no grammar can follow."""
    for i, tool in enumerate(asked.tools or []):
        if _is_held(tool, asked):
            await _check_parameters(state, i, tool)


def _is_held(tool: Tool, asked: ChatRequest) -> bool:
    """Whether calls of a tool follow its schema."""
    choice = asked.tool_choice
    if isinstance(choice, NamedTool):
        return tool.function.name == choice.function.name
    return choice == "required" or bool(tool.function.strict) or asked.response_format is not None


async def _check_parameters(state: ServerState, i: int, tool: Tool) -> None:
    schema = arguments_schema(msgspec.to_builtins(tool.function))
    try:
        await state.grammars.check(Grammar("json_schema", json.dumps(schema)))
    except BadRequest as error:
        raise BadField(
            f"tools[{i}].function.parameters",
            f"the parameters of tools[{i}], {tool.function.name!r}: {error.message}",
            error.hint,
        ) from None


def _output(state: ServerState, asked: ChatRequest, grammar: Grammar | None) -> Output:
    both = (asked.max_completion_tokens, asked.max_tokens)
    if None not in both and both[0] != both[1]:
        raise BadField(
            "max_tokens",
            f"max_completion_tokens is {both[0]} and max_tokens is {both[1]}",
            "Give one of them",
        )
    if asked.top_logprobs and not asked.logprobs:
        raise BadField(
            "top_logprobs",
            f"top_logprobs is {asked.top_logprobs}, but logprobs are not asked for",
            "Set logprobs to true",
        )
    within("top_logprobs", asked.top_logprobs or 0, state.options.max_logprobs)
    return Output(
        max_tokens=both[1] if both[0] is None else both[0],
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=grammar,
    )


routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
