"""What translations of other APIs' requests to a chat share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cairn.server.protocol.chat import ChatRequest
from cairn.server.protocol.explain import explained

Content = str | list[dict[str, Any]]
"""Of a message of a chat."""


def message(role: str, content: Content) -> dict[str, Any]:
    """A message of a chat."""
    return {"role": role, "content": content}


def content_of(parts: Sequence[dict[str, Any]]) -> Content:
    """Content made of text and image parts: a list if there are images, else a string."""
    if any(part["type"] == "image_url" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)


def text_part(text: str) -> dict[str, Any]:
    """A text as part of a message's content."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """An image as part of a message's content."""
    return {"type": "image_url", "image_url": url}


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """A chat request from its fields. Raises BadField for one that no chat can have."""
    try:
        return msgspec.convert(body, ChatRequest)
    except msgspec.ValidationError as error:
        raise explained(error, ChatRequest, body) from None
