"""Disaggregated prefill without a router: the decoding server sends prompts to a prefill server.

Replaces the router of docs/disaggregation.md for servers that reach each other through Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.server.in_process import Headers, post, replay_body, with_content_length

log = logging.getLogger(__name__)

PARAMETERS = "kv_transfer_params"
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Paths of generation requests, and the field with their token limit."""
KEPT = {"stream": False, PARAMETERS: {"do_remote_decode": True}}
LEFT_OUT = ("max_completion_tokens", "min_tokens", "n", "stream_options", "best_of")
"""Request fields that contradict a limit of one token."""

Prompt = Callable[[str, Headers, bytes], Awaitable[dict[str, Any] | None]]


class RemotePrefillMiddleware:
    """Sends the prompts of generation requests to a prefill server before `app` handles them.

    If the prefill server fails, `app` computes the prompt itself.

    Args:
        app: the decoding server.
        prompt: calls `run_prefill` of the prefill server.
    """

    def __init__(self, app: ASGIApp, prompt: Prompt) -> None:
        self._app, self._prompt = app, prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        asks = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in LIMITS
        if not asks:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        asked = _fields(body)
        if asked is not None and PARAMETERS not in asked:
            first = {name: value for name, value in asked.items() if name not in LEFT_OUT}
            first |= KEPT | {LIMITS[scope["path"]]: 1}
            headers: Headers = [(name, value) for name, value in scope["headers"]]
            try:
                found = await self._prompt(scope["path"], headers, msgspec.json.encode(first))
            except Exception:
                log.warning("a prompt was not computed by the other server", exc_info=True)
                found = None
            if found is not None:
                body = msgspec.json.encode(asked | {PARAMETERS: found})
                scope = {**scope, "headers": with_content_length(headers, len(body))}
        await self._app(scope, replay_body(body, receive), send)


async def run_prefill(
    app: ASGIApp, path: str, headers: Headers, body: bytes
) -> dict[str, Any] | None:
    """Run a request for one token on a prefill server.

    Args:
        app: the prefill server.
        path, headers, body: path, headers and body of the request.

    Returns:
        The `kv_transfer_params` of the response; None if the request failed.
    """
    status, _, answered = await post(app, path, headers, body)
    answer = _fields(answered)
    if status != 200 or answer is None:
        return None
    found: dict[str, Any] | None = answer.get(PARAMETERS)
    return found


async def _body(receive: Receive) -> bytes:
    parts, more = bytearray(), True
    while more:
        message = await receive()
        parts += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    return bytes(parts)


def _fields(body: bytes) -> dict[str, Any] | None:
    """The JSON object in a body; None if it is not one."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
