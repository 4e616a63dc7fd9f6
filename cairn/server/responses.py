"""/v1/responses: OpenAI's Responses API, stateless, translated to chat requests and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.errors import CairnError
from cairn.obs.metrics import Track
from cairn.server.chat import prepared
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
from cairn.server.protocol.chat import ChatChunkChoice, ChatRequest
from cairn.server.protocol.common import Usage
from cairn.server.protocol.explain import explained
from cairn.server.protocol.responses import (
    CallOutput,
    FlatChoice,
    FlatSchemaFormat,
    InputCall,
    InputImage,
    InputMessage,
    InputText,
    Item,
    OutputText,
    Reasoning,
    ResponsesAnswer,
    ResponsesEvent,
    ResponsesRequest,
    ResponsesUsage,
)
from cairn.server.request_body import read_request
from cairn.server.sse import EventStream
from cairn.server.state import ServerState

FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""`FieldNames` of the fields other than messages."""


async def create_response(request: Request) -> Response:
    """POST /v1/responses. Raises CairnError for a request that cannot be served."""
    state: ServerState = request.app.state.server
    track = state.metrics.track(request.url.path)
    given = await read_request(request, ResponsesRequest)
    chat_given, names = chat_of(given)
    with fields_renamed(names):
        work, chat = await prepared(request, chat_given)
    builder = ResponsesBuilder(chat, given)
    if not given.stream:
        return await answer(request, work, builder, track, None)
    generation = Generation(state.client, work, builder.head.id)
    return EventStream(_events(generation, builder, track), lambda: generation.reading)


def chat_of(given: ResponsesRequest) -> tuple[ChatRequest, FieldNames]:
    """The equivalent chat request, and the original names of its fields.

    Raises:
        BadRequest: an item that a chat request cannot express.
    """
    messages = [] if given.instructions is None else [message("system", given.instructions)]
    paths: list[tuple[str, str | None]] = [("instructions", None)] * len(messages)
    if isinstance(given.input, str):
        messages.append(message("user", given.input))
        paths.append(("input", None))
    else:
        for i, fields in enumerate(given.input):
            path = f"input[{i}]"
            item = _item(path, fields)
            _add(messages, item)
            content = f"{path}.output" if isinstance(item, CallOutput) else f"{path}.content"
            # An item may have been added to an earlier message.
            paths += [(path, content)] * (len(messages) - len(paths))
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": given.max_output_tokens,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "parallel_tool_calls": given.parallel_tool_calls,
        "reasoning_effort": given.reasoning.effort if given.reasoning is not None else None,
        "response_format": _format(given),
        "tool_choice": given.tool_choice,
        "stream": given.stream,
        "kv_transfer_params": given.kv_transfer_params,
    }
    if isinstance(given.tool_choice, FlatChoice):
        body["tool_choice"] = {"type": "function", "function": {"name": given.tool_choice.name}}
    if given.tools:
        functions = [msgspec.to_builtins(tool) for tool in given.tools]
        body["tools"] = [{"type": f.pop("type"), "function": f} for f in functions]
    names = message_names(paths) | FIELD_NAMES
    with fields_renamed(names):
        return chat_request(body), names


def _item(name: str, item: dict[str, Any]) -> Item:
    try:
        read: Item = msgspec.convert({"type": "message", **item}, Item)
    except msgspec.ValidationError as error:
        raise explained(error, Item, item, within=name) from None
    return read


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Append an item to the messages of a chat. Consecutive calls share a message."""
    last = messages[-1] if messages else None
    match item:
        case Reasoning():
            thought = "\n".join(part.text for part in item.content or ())
            if thought:
                messages.append(message("assistant", "") | {"reasoning_content": thought})
        case InputMessage() if last is not None and _only_thought(last, item):
            last["content"] = content_of(item.content, _part)
        case InputMessage():
            messages.append(message(item.role, content_of(item.content, _part)))
        case InputCall():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(message("assistant", ""))
            messages[-1].setdefault("tool_calls", []).append(call)
        case CallOutput():
            messages.append(
                message("tool", content_of(item.output, _part)) | {"tool_call_id": item.call_id}
            )


def _only_thought(message: dict[str, Any], item: InputMessage) -> bool:
    """Whether `message` holds only the reasoning that precedes the assistant's message `item`."""
    keys = {"role", "content", "reasoning_content"}
    return message.keys() == keys and not message["content"] and item.role == "assistant"


def _part(part: InputText | OutputText | InputImage) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return image_part(part.image_url or "")
    return text_part(part.text)


def _format(given: ResponsesRequest) -> dict[str, Any] | None:
    form = given.text.format if given.text is not None else None
    if form is None:
        return None
    fields: dict[str, Any] = msgspec.to_builtins(form)
    kind = fields.pop("type")
    return {"type": kind, kind: fields} if isinstance(form, FlatSchemaFormat) else {"type": kind}


class ResponsesBuilder:
    """Builds responses of /v1/responses from those of a chat.

    Args:
        chat: builds the chat's response.
        given: the request.
    """

    def __init__(self, chat: ChatResponseBuilder, given: ResponsesRequest) -> None:
        self.head = chat.head
        self.push = chat.push
        self.over = chat.over
        self.chunk = chat.chunk
        self._chat = chat
        self.id = self.head.id.replace("chatcmpl-", "resp_")
        self._given = given

    def whole(self, parts: list[list[ChatChunkChoice]], usage: Usage) -> ResponsesAnswer:
        """See ResponseBuilder."""
        choice = joined(parts[0])
        output = []
        if choice.message.reasoning_content:
            output.append(self.thought(0, choice.message.reasoning_content))
        if choice.message.content:
            output.append(self.text(len(output), choice.message.content))
        for call in choice.message.tool_calls or ():
            function = call.function
            output.append(self.call(len(output), call.id, function.name, function.arguments))
        return self.answer(output, usage, choice.finish_reason)

    def thought(self, index: int, text: str, status: str = "completed") -> dict[str, Any]:
        """A reasoning item."""
        part = {"type": "reasoning_text", "text": text}
        return {
            "type": "reasoning",
            "id": f"rs_{self.id[5:]}_{index}",
            "status": status,
            "summary": [],
            "content": [part] if status == "completed" else [],
        }

    def text(self, index: int, text: str, status: str = "completed") -> dict[str, Any]:
        """A message item."""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "type": "message",
            "id": f"msg_{self.id[5:]}_{index}",
            "status": status,
            "role": "assistant",
            "content": [part] if status == "completed" else [],
        }

    def call(
        self, index: int, call_id: str, name: str, arguments: str, status: str = "completed"
    ) -> dict[str, Any]:
        """A function call item."""
        return {
            "type": "function_call",
            "id": f"fc_{self.id[5:]}_{index}",
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
            "status": status,
        }

    def answer(
        self, output: list[dict[str, Any]], usage: Usage | None, reason: str | None
    ) -> ResponsesAnswer:
        """The response; `reason` is the chat's finish_reason, None while it is in progress."""
        given, cut = self._given, reason == "length"
        return ResponsesAnswer(
            id=self.id,
            created_at=self.head.created,
            model=self.head.model,
            status="in_progress" if reason is None else "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            instructions=given.instructions,
            max_output_tokens=given.max_output_tokens,
            output=output,
            parallel_tool_calls=given.parallel_tool_calls is not False,
            temperature=given.temperature,
            tool_choice=given.tool_choice or "auto",
            tools=[msgspec.to_builtins(tool) for tool in given.tools or ()],
            top_p=given.top_p,
            usage=None if usage is None else self._usage(usage),
        )

    def _usage(self, usage: Usage) -> ResponsesUsage:
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": self._chat.reasoning_tokens},
            total_tokens=usage.total_tokens,
        )


async def _events(
    generation: Generation, builder: ResponsesBuilder, track: Track
) -> AsyncGenerator[bytes, None]:
    items = _Items(builder)
    begun, reason = False, None
    try:
        async with aclosing(parts_of(generation, builder, track)) as run:
            async for part in run:
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield items.event(kind, response=builder.answer([], None, None))
                reason = part.finish_reason or reason
                for event in items.take(part):
                    yield event
        last = builder.answer(items.done, generation.usage, reason or "stop")
        yield items.event(f"response.{last.status}", response=last)
    except CairnError as error:
        if not begun:
            raise
        detail = body_of(error).error
        yield items.event("error", code=detail.code or detail.type, message=detail.message)


class _Items:
    """Converts the parts of a chat's stream to events, one open output item at a time.

    Attributes:
        done: completed output items.
    """

    def __init__(self, builder: ResponsesBuilder) -> None:
        self.done: list[dict[str, Any]] = []
        self._shape = builder
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._written = ""

    def event(self, kind: str, **fields: Any) -> bytes:
        """Encode an event with the next sequence number."""
        data = msgspec.json.encode(ResponsesEvent(kind, self._number, **fields))
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def take(self, part: ChatChunkChoice) -> Iterator[bytes]:
        """Yield the events for a part."""
        if part.delta.reasoning_content:
            yield from self._write(part.delta.reasoning_content, "reasoning")
        if part.delta.content:
            yield from self._write(part.delta.content, "message")
        for call in part.delta.tool_calls or ():
            if call.id:
                yield from self._end()
                yield from self._begin_call(call.id, call.function.name or "")
            if call.function.arguments:
                yield from self._add(call.function.arguments)
        if part.finish_reason is not None:
            yield from self._end()

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.done)}
        return place if self._open["type"] == "function_call" else place | {"content_index": 0}

    def _write(self, text: str, kind: str) -> Iterator[bytes]:
        make = self._shape.text if kind == "message" else self._shape.thought
        if self._open is None or self._open["type"] != kind:
            yield from self._end()
            self._open = make(len(self.done), "", "in_progress")
            yield self.event(
                "response.output_item.added", output_index=len(self.done), item=self._open
            )
            empty = make(len(self.done), "")["content"][0]
            yield self.event("response.content_part.added", part=empty, **self._place)
        self._written += text
        if kind == "message":
            yield self.event("response.output_text.delta", delta=text, logprobs=[], **self._place)
        else:
            yield self.event("response.reasoning_text.delta", delta=text, **self._place)

    def _begin_call(self, call_id: str, name: str) -> Iterator[bytes]:
        self._open = self._shape.call(len(self.done), call_id, name, "", "in_progress")
        yield self.event("response.output_item.added", output_index=len(self.done), item=self._open)

    def _add(self, arguments: str) -> Iterator[bytes]:
        self._written += arguments
        yield self.event("response.function_call_arguments.delta", delta=arguments, **self._place)

    def _end(self) -> Iterator[bytes]:
        """Yield the events that complete the open item."""
        item, written, at = self._open, self._written, len(self.done)
        if item is None:
            return
        place = self._place
        if item["type"] == "message":
            item = self._shape.text(at, written)
            yield self.event("response.output_text.done", text=written, logprobs=[], **place)
            yield self.event("response.content_part.done", part=item["content"][0], **place)
        elif item["type"] == "reasoning":
            item = self._shape.thought(at, written)
            yield self.event("response.reasoning_text.done", text=written, **place)
            yield self.event("response.content_part.done", part=item["content"][0], **place)
        else:
            name = item["name"]
            item = self._shape.call(at, item["call_id"], name, written)
            kind = "response.function_call_arguments.done"
            yield self.event(kind, name=name, arguments=written, **place)
        yield self.event("response.output_item.done", output_index=at, item=item)
        self.done.append(item)
        self._open, self._written = None, ""


routes = [Route("/v1/responses", create_response, methods=["POST"])]
