"""Parsing of request bodies, and helpers for the work on their prompts."""

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
"""Largest body in bytes whose prompts are encoded in the event loop instead of a thread."""


async def read_request(request: Request, kind: type[F]) -> F:
    """Parse the body of a request into a struct.

    Raises:
        HTTPException: 415 unless the content type is JSON. Browsers send other types to this server
            on behalf of any website, without a CORS preflight.
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
    """Run `work`, which encodes or decodes a request's prompts, in a thread if the body is long."""
    return await run_inline_if_short(len(await request.body()), work)


async def run_inline_if_short(size: int, work: Callable[[], T]) -> T:
    """Run `work` on `size` bytes: in a thread if they are more than SHORT_BODY, else directly."""
    if size <= SHORT_BODY:
        return work()
    return await asyncio.to_thread(work)


def tokenizer_of(state: ServerState, what: str) -> Tokenizer:
    """The model's tokenizer. Raises BadRequest if there is none; `what` names the use of it."""
    if state.tokenizer is None:
        raise BadRequest(
            f"{what} needs a tokenizer, but this model has none",
            "Send token ids to /v1/completions",
        )
    return state.tokenizer


def longest_prompt(state: ServerState, max_tokens: int | None = None) -> int:
    """Maximum prompt length in tokens, given `max_tokens` of output."""
    return admission.longest_prompt(state.client.info.max_model_len, max_tokens)
