"""Chat messages in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from reprlib import repr as short
from typing import Any

from cairn.errors import BadRequest

Message = Mapping[str, Any]

PLAIN_CALL = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def checked_messages(
    messages: Sequence[Message], media: Container[str] = ()
) -> list[dict[str, Any]]:
    """Copies of the messages, normalised for chat templates.

    Content stays a list of parts where one of these is {"type": M} with M of `media`, which stands
    for an image or a video. Else it becomes a string (text parts are joined by line breaks; none,
    of a tool or the assistant, is empty), and the arguments of tool calls become
    mappings, because templates print them as JSON. Arguments that are no JSON object, as a model
    may have written them, stay what they are, as text: one malformed call must not end a
    conversation. `reasoning`, as some servers call it, becomes `reasoning_content`, which templates
    read.

    Raises:
        BadRequest: no message, a message without role or content, a content part that is not
            text, or a tool call that is not one.
    """
    if not messages:
        raise BadRequest("messages is empty", "Give at least one message")
    return [_message(f"messages[{i}]", message, media) for i, message in enumerate(messages)]


def with_placeholders(
    messages: Sequence[Message], placeholders: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Checked messages whose content is text alone: placeholders stand where images do."""
    return [{**message, "content": _flat(message["content"], placeholders)} for message in messages]


def _flat(content: str | list[Mapping[str, str]], placeholders: Mapping[str, str]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"] if part["type"] == "text" else placeholders[part["type"]] for part in content
    )


def plain_text(
    messages: Sequence[Message], answer: bool, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The conversation for models without a chat template.

    Each message is a line `role: content`. `assistant:` follows where an answer is asked for;
    otherwise the last line stays open. Tools come first, a line each, and calls stand behind what
    the assistant said, in the form of Hermes models.

    Args:
        messages: as `checked_messages` gives them.
        answer: the assistant is to answer.
        tools: function descriptions as OpenAI writes them.
    """
    lines = [f"{message['role']}: {_with_calls(message)}" for message in messages]
    if tools:
        printed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        lines.insert(0, f"tools, called as {PLAIN_CALL}:\n{printed}")
    text = "\n".join(lines)
    return f"{text}\nassistant:" if answer else text


def _with_calls(message: Message) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def _message(name: str, message: Any, media: Container[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{name} must be a mapping with role and content, not {short(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{name} needs a string 'role', not {short(role)}")
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = plain.pop("reasoning", None)
    if reasoning is not None:
        plain.setdefault("reasoning_content", reasoning)
    optional = role in ("tool", "assistant")
    plain["content"] = _content(name, message.get("content"), optional, media)
    # Templates ask whether there are calls by the list or by its name.
    calls = _tool_calls(f"{name}.tool_calls", plain.pop("tool_calls", ()))
    return {**plain, "tool_calls": calls} if calls else plain


def _content(
    name: str, content: Any, optional: bool, media: Container[str]
) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BadRequest(
            f"{name} needs a string 'content' or a list of text parts, not {short(content)}"
        )
    parts = [_part(f"{name}.content[{i}]", part, media) for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(name: str, part: Any, media: Container[str]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in media:
        return {"type": kind}
    if kind != "text":
        what = f"is of type {short(kind)}" if isinstance(kind, str) else f"is {short(part)}"
        raise BadRequest(
            f"{name} {what}, but only text is read", 'Give {"type": "text", "text": ...}'
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{name} needs a string 'text', not {short(text)}")
    return {"type": "text", "text": text}


def _tool_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise BadRequest(f"{name} must be a list, not {short(calls)}")
    checked = [_tool_call(f"{name}[{i}]", call) for i, call in enumerate(calls)]
    # Clients that store histories leave `type` out or write null as an id.
    given = [{k: v for k, v in call.items() if v is not None} for call in checked]
    return [{"type": "function", **call} for call in given]


def _tool_call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{name} needs a 'function' with a string 'name', not {short(call)}")
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(given: Any) -> dict[str, Any] | str:
    """A call's arguments; a text where they are no JSON object."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False, default=str)
    try:
        parsed = json.loads(given)
        # An unpaired surrogate (a JSON escape such as \ud800) cannot be encoded as UTF-8.
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


def with_wrapped_arguments(messages: Sequence[Message]) -> list[dict[str, Any]] | None:
    """The checked messages with arguments that are a text as `{"arguments": text}`, for templates
    that walk through them; None where there are none."""
    changed = False
    wrapped = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], str):
                changed = True
                function = {**function, "arguments": {"arguments": function["arguments"]}}
            calls.append({**call, "function": function})
        wrapped.append({**message, "tool_calls": calls} if calls else dict(message))
    return wrapped if changed else None
