"""/v1/messages: Anthropic's Messages API, translated to chat requests and back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.errors import CairnError
from cairn.obs.metrics import Track
from cairn.server.chat import encode_chat, prepared, template_tools
from cairn.server.chat_output import ChatResponseBuilder, joined
from cairn.server.chat_translation import (
    FieldNames,
    chat_request,
    content_of,
    fields_renamed,
    image_part,
    message,
    message_names,
    text_part,
)
from cairn.server.errors import body_of
from cairn.server.generation import Generation, answer, parts_of
from cairn.server.protocol.chat import ChatChoice, ChatChunkChoice, ChatRequest
from cairn.server.protocol.common import Usage
from cairn.server.protocol.messages import (
    AnthropicChoice,
    AnyChoice,
    AssistantTurn,
    AutoChoice,
    CountRequest,
    ImageBlock,
    MessageEvent,
    MessageResponse,
    MessagesRequest,
    MessageUsage,
    NoChoice,
    StopReason,
    SystemBlock,
    SystemTurn,
    TextBlock,
    TextContent,
    ThinkingBlock,
    ThinkingContent,
    TokenCount,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    ToolUseContent,
    Turn,
    UserTurn,
)
from cairn.server.request_body import read_request, tokenizer_of
from cairn.server.sse import EventStream
from cairn.server.state import ServerState

PASSED_ON = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "kv_transfer_params",
)
"""Fields that are also those of a chat."""
FIELD_NAMES = {
    "stop": "stop_sequences",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""`FieldNames` of the other fields, apart from messages."""
STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(request: Request) -> Response:
    """POST /v1/messages. Raises CairnError for a request that cannot be served."""
    state: ServerState = request.app.state.server
    track = state.metrics.track(request.url.path)
    given = await read_request(request, MessagesRequest)
    chat_given, names = chat_of(given)
    with fields_renamed(names):
        work, builder = await prepared(request, chat_given)
    message = MessageResponseBuilder(builder)
    if not given.stream:
        return await answer(request, work, message, track, None)
    generation = Generation(state.client, work, message.head.id)
    events = _events(generation, message, track)
    return EventStream(events, lambda: generation.reading)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens. Raises BadRequest for an invalid conversation."""
    state: ServerState = request.app.state.server
    asked, names = chat_of(await read_request(request, CountRequest))
    tokenizer = tokenizer_of(state, "a chat")
    tools = template_tools(asked.tools or [])
    with fields_renamed(names):
        chat = await encode_chat(request, tokenizer, asked, tools)
    return Response(msgspec.json.encode(TokenCount(len(chat.ids))), media_type="application/json")


def chat_of(given: CountRequest) -> tuple[ChatRequest, FieldNames]:
    """The equivalent chat request, and the original names of its fields.

    Raises:
        BadRequest: a message that a chat request cannot express.
    """
    messages = [] if given.system is None else [message("system", content_of(given.system, _part))]
    paths: list[tuple[str, str | None]] = [("system", "system")] * len(messages)
    for i, turn in enumerate(given.messages):
        messages += _turn(turn)
        same_parts = all(isinstance(block, TextBlock | ImageBlock) for block in turn.content)
        path = f"messages[{i}]", f"messages[{i}].content" if same_parts else None
        paths += [path] * (len(messages) - len(paths))
    body: dict[str, Any] = {"messages": messages}
    if isinstance(given.messages[-1], AssistantTurn):
        body["continue_final_message"] = True
    if given.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in given.tools
        ]
    if given.output_config is not None:
        body["reasoning_effort"] = given.output_config.effort
        if given.output_config.format is not None:
            schema = {"schema": given.output_config.format.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if given.thinking is not None and given.thinking.type == "disabled":
        body["reasoning_effort"] = "none"
    if given.tool_choice is not None:
        body |= _choice(given.tool_choice)
    if isinstance(given, MessagesRequest):
        body["stop"] = given.stop_sequences
        for name in PASSED_ON:
            body[name] = getattr(given, name)
    names = message_names(paths) | FIELD_NAMES
    with fields_renamed(names):
        return chat_request(body), names


def _choice(choice: AnthropicChoice) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    match choice:
        case AutoChoice():
            chosen["tool_choice"] = "auto"
        case AnyChoice():
            chosen["tool_choice"] = "required"
        case NoChoice():
            chosen["tool_choice"] = "none"
        case ToolChoice():
            chosen["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        chosen["parallel_tool_calls"] = False
    return chosen


def _turn(turn: Turn) -> Iterator[dict[str, Any]]:
    """The chat messages of a turn. Tool results become separate messages."""
    role = {SystemTurn: "system", UserTurn: "user", AssistantTurn: "assistant"}[type(turn)]
    if isinstance(turn.content, str):
        yield message(role, turn.content)
        return
    texts: list[TextBlock | SystemBlock | ImageBlock] = []
    thoughts: list[str] = []
    calls = []
    results = 0
    for block in turn.content:
        match block:
            case TextBlock() | SystemBlock() | ImageBlock():
                texts.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                answer = message("tool", content_of(block.content or "", _part))
                yield answer | {"tool_call_id": block.tool_use_id}
                results += 1
    said = message(role, content_of(texts, _part))
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if texts or not results:
        yield said


def _part(block: TextBlock | SystemBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, ImageBlock):
        return image_part(block.source.as_url)
    return text_part(block.text)


class MessageResponseBuilder:
    """Builds responses of /v1/messages from those of a chat.

    Args:
        chat: builds the chat's response.
    """

    def __init__(self, chat: ChatResponseBuilder) -> None:
        self.head = chat.head
        self.push = chat.push
        self.over = chat.over
        self.chunk = chat.chunk

    def whole(self, parts: list[list[ChatChunkChoice]], usage: Usage) -> MessageResponse:
        """See ResponseBuilder."""
        choice = joined(parts[0])
        return self.message(_blocks(choice), usage, *_ending(choice))

    def message(
        self,
        content: list[ThinkingContent | TextContent | ToolUseContent],
        usage: Usage,
        reason: StopReason | None = None,
        sequence: str | None = None,
    ) -> MessageResponse:
        """The response with this content."""
        return MessageResponse(
            id=self.head.id.replace("chatcmpl", "msg"),
            model=self.head.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(usage),
        )


def _blocks(choice: ChatChoice) -> list[ThinkingContent | TextContent | ToolUseContent]:
    message = choice.message
    content: list[ThinkingContent | TextContent | ToolUseContent] = []
    if message.reasoning_content:
        content.append(ThinkingContent(message.reasoning_content))
    if message.content:
        content.append(TextContent(message.content))
    for call in message.tool_calls or ():
        written = call.function.arguments
        try:
            given = json.loads(written)
            if not isinstance(given, dict):
                raise ValueError("no object")
        except ValueError:
            given = {} if choice.finish_reason == "length" else {"arguments": written}
        content.append(ToolUseContent(call.id, call.function.name, given))
    return content


def _ending(choice: ChatChoice | ChatChunkChoice) -> tuple[StopReason, str | None]:
    """The stop_reason and stop_sequence of a choice."""
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return STOP_REASONS.get(choice.finish_reason or "", "end_turn"), None


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


async def _events(
    generation: Generation, builder: MessageResponseBuilder, track: Track
) -> AsyncGenerator[bytes, None]:
    blocks = _Blocks()
    begun = False
    try:
        async with aclosing(parts_of(generation, builder, track)) as run:
            async for part in run:
                if not begun:
                    begun = True
                    yield _event("message_start", message=builder.message([], generation.usage))
                for event in blocks.take(part):
                    yield event
                if part.finish_reason is not None:
                    reason, sequence = _ending(part)
                    delta = {"stop_reason": reason, "stop_sequence": sequence}
                    usage = _usage(generation.usage)
                    yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")
    except CairnError as error:
        if not begun:
            raise
        yield _event("error", error=msgspec.to_builtins(body_of(error).error))


class _Blocks:
    """Converts the parts of a chat's stream to content block events, one open block at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""

    def take(self, part: ChatChunkChoice) -> Iterator[bytes]:
        """Yield the events for a part."""
        if part.delta.reasoning_content:
            if self._open != "thinking":
                yield from self._begin("thinking", thinking="", signature="")
            yield self._add(type="thinking_delta", thinking=part.delta.reasoning_content)
        if part.delta.content:
            if self._open != "text":
                yield from self._begin("text", text="")
            yield self._add(type="text_delta", text=part.delta.content)
        for call in part.delta.tool_calls or ():
            if call.id:
                yield from self._begin("tool_use", id=call.id, name=call.function.name, input={})
            if call.function.arguments:
                yield self._add(type="input_json_delta", partial_json=call.function.arguments)
        if part.finish_reason is not None:
            yield from self._end()

    def _begin(self, kind: str, **fields: Any) -> Iterator[bytes]:
        yield from self._end()
        self._index += 1
        self._open = kind
        block = {"type": kind, **fields}
        yield _event("content_block_start", index=self._index, content_block=block)

    def _add(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> Iterator[bytes]:
        if self._open:
            if self._open == "thinking":
                yield self._add(type="signature_delta", signature="")
            self._open = ""
            yield _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    data = msgspec.json.encode(MessageEvent(kind, **fields))
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


routes = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
