"""Helpers to translate requests of other APIs to chat requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from cairn.errors import BadRequest
from cairn.server.protocol.chat import ChatRequest
from cairn.server.protocol.explain import explained

P = TypeVar("P")
Content = str | list[dict[str, Any]]
"""Content of a chat message."""
FieldNames = Mapping[str, str]
"""Regular expression of the path of a chat field -> template of the original path."""


def message(role: str, content: Content) -> dict[str, Any]:
    """A chat message."""
    return {"role": role, "content": content}


def content_of(content: str | Sequence[P], part_of: Callable[[P], dict[str, Any]]) -> Content:
    """Message content of text and image parts: a list if there are images, else a string.

    Args:
        content: a text, or parts in the format of another API.
        part_of: converts such a part with `text_part` or `image_part`.
    """
    if isinstance(content, str):
        return content
    parts = [part_of(part) for part in content]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def text_part(text: str) -> dict[str, Any]:
    """A text part of a message."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """An image part of a message."""
    return {"type": "image_url", "image_url": url}


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """Convert the fields of a chat request to its struct. Raises BadField for an invalid field."""
    try:
        return msgspec.convert(body, ChatRequest)
    except msgspec.ValidationError as error:
        raise explained(error, ChatRequest, body) from None


def message_names(paths: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """`FieldNames` of the messages.

    Args:
        paths: for each message, path of its source in the original request, and of the source of
            its content; None: the parts of the content have different indices there.
    """
    names = {}
    for i, (path, content) in enumerate(paths):
        own = rf"messages\[{i}\]"
        if content is None:
            names[rf"{own}\.content\[\d+\]"] = path
        else:
            names[rf"{own}\.content"] = content
        names[own] = path
    return names


@contextmanager
def fields_renamed(names: FieldNames) -> Iterator[None]:
    """Context manager: in a BadRequest raised inside, replace the path of the chat field by the
    path in the original request."""
    try:
        yield
    except BadRequest as error:
        path = error.param
        if path is not None and (original := _renamed(path, names)) != path:
            used = re.compile(rf"(?<![\w.]){re.escape(path)}(?!\w)")
            error.param = original
            error.message = used.sub(lambda _: original, error.message)
            error.args = tuple(used.sub(lambda _: original, text) for text in error.args)
        raise


def _renamed(path: str, names: FieldNames) -> str:
    for pattern, template in names.items():
        found = re.match(rf"{pattern}(?!\w)", path)
        if found is not None:
            return found.expand(template) + path[found.end() :]
    return path
