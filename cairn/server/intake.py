"""Reading a request body, and running long work outside of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cairn.engine import admission
from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadRequest
from cairn.server.models import check_model
from cairn.server.protocol.fields import Fields, read
from cairn.server.state import ServerState

F = TypeVar("F", bound=Fields)
T = TypeVar("T")

SHORT_BODY = 16 * 1024
"""Bytes of a body whose prompts are encoded at once; longer ones go to a thread."""


async def read_request(request: Request, kind: type[F]) -> F:
    """The body of a request as its struct.

    Raises:
        HTTPException: 415 unless the body is said to be JSON. (A page of another site can make a
            browser post anything else without asking this server first.)
        BadRequest: see `protocol.fields.read`.
        NotFound: the body names a model that is not served.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(
            415, f"the content type is {media_type or 'missing'!r}, use application/json"
        )
    body = read(await request.body(), kind)
    check_model(request.app.state.server, getattr(body, "model", None))
    return body


async def encoded(request: Request, work: Callable[[], T]) -> T:
    """The result of `work`, which encodes or decodes what the request brought. Other requests go
    on meanwhile when it may take long."""
    return await at_once_if_short(len(await request.body()), work)


async def at_once_if_short(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, which reads `size` bytes: at once when they are few, else in a
    thread."""
    if size <= SHORT_BODY:
        return work()
    return await asyncio.to_thread(work)


def tokenizer_of(state: ServerState, what: str) -> Tokenizer:
    """The tokenizer. Raises BadRequest for a model without one; `what` needs it."""
    if state.tokenizer is None:
        raise BadRequest(
            f"{what} needs a tokenizer, but this model has none",
            "Send token ids to /v1/completions",
        )
    return state.tokenizer


def longest_prompt(state: ServerState, max_tokens: int | None = None) -> int:
    """Tokens of the longest prompt of a request for so many tokens."""
    return admission.longest_prompt(state.client.info.max_model_len, max_tokens)
