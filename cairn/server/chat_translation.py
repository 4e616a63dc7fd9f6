"""Helpers to translate requests of other APIs to chat requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from cairn.server.protocol.chat import ChatRequest
from cairn.server.protocol.explain import explained

P = TypeVar("P")
Content = str | list[dict[str, Any]]
"""Content of a chat message."""


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
