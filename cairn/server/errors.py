"""Error responses in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cairn.errors import BadRequest, CairnError, TooLong
from cairn.server.protocol.common import ErrorBody, ErrorDetail

log = logging.getLogger(__name__)

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
CODES = {
    401: "invalid_api_key",
    429: "rate_limit_exceeded",
}
API_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/messages",
    "/v1/responses",
)
USE_CHAT = "Use /v1/chat/completions"
OTHER_APIS = {
    "/v1/responses/": "Answers are not kept: send the whole conversation to /v1/responses",
    "/api/chat": f"Ollama's API is not served. {USE_CHAT}",
    "/api/generate": "Ollama's API is not served. Use /v1/completions",
    "/api/tags": "Ollama's API is not served. Use /v1/models",
    "/batches": "`cairn batch` answers a batch file",
    "/files": "This server keeps no files",
    "/generate": "Use /v1/completions",
    "/embed": "The model makes no embeddings: this server generates text",
    "/rerank": "The model ranks nothing: this server generates text",
    "/score": "Log-probabilities of a text come from /v1/completions with echo and logprobs",
    "/audio/": "This server reads and writes text only",
    "/images/": "This server reads and writes text only",
}
"""Paths of OpenAI's API that are not served -> the alternative to suggest."""
LONGEST_TEXT = 2000
CLIENT_GONE = 499
"""Status in logs and metrics when the client has disconnected (nginx's code)."""
INTERNAL = "the server failed on this request; its log says more"


class NotFound(BadRequest):
    """A model name that is not served."""

    http_status = 404


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """The error body of an HTTP status."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    named = shortened(param) if param is not None else None
    return ErrorBody(ErrorDetail(shortened(message), kind, named, code or CODES.get(status)))


def shortened(text: str) -> str:
    """The text of an error, shortened because it may quote a large field of the request."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error response."""
    body = msgspec.json.encode(error_body(status, message, param=param, code=code))
    return Response(body, status, headers, media_type="application/json")


def body_of(error: CairnError) -> ErrorBody:
    """The error body of an exception."""
    code = None
    if isinstance(error, TooLong):
        code = "context_length_exceeded"
    elif isinstance(error, NotFound):
        code = "model_not_found"
    return error_body(error.http_status, str(error), param=error.param, code=code)


def response_of(error: CairnError) -> Response:
    """The error response of an exception, with Retry-After where it has one."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return Response(
        msgspec.json.encode(body_of(error)),
        error.http_status,
        headers,
        media_type="application/json",
    )


@contextmanager
def about(param: str) -> Iterator[None]:
    """Context manager: set `param` of a BadRequest that is raised inside and has none."""
    try:
        yield
    except BadRequest as error:
        if error.param is None:
            error.param = param
        raise


async def on_cairn_error(request: Request, error: Exception) -> Response:
    """Exception handler of CairnError."""
    assert isinstance(error, CairnError)
    if error.http_status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return response_of(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Exception handler of HTTPException: unknown routes, wrong methods."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {path}: {error.detail}"
    hint = _hint_at(path) if error.status_code == 404 else None
    allowed = (error.headers or {}).get("Allow") if error.status_code == 405 else None
    if allowed is not None:
        hint = f"Use {allowed}"
    if hint is not None:
        message = f"{message}. {hint}"
    return error_response(error.status_code, message, headers=error.headers)


def _hint_at(path: str) -> str | None:
    """The route to use instead of a path that is not served, or None."""
    known = next((hint for name, hint in OTHER_APIS.items() if name in path), None)
    if known is not None:
        return known
    meant = next((name for name in API_PATHS if path.endswith(name.removeprefix("/v1"))), None)
    return f"Use {meant}" if meant is not None else None


async def on_gone(request: Request, error: Exception) -> Response:
    """Exception handler of ClientDisconnect. Only logs and metrics see its status."""
    return Response(status_code=CLIENT_GONE)


async def on_failure(request: Request, error: Exception) -> Response:
    """Exception handler of bugs: log the traceback, send a 500 without details."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(500, INTERNAL)


Handler = Callable[[Request, Exception], Awaitable[Response]]

HANDLERS: dict[type[Exception] | int, Handler] = {
    CairnError: on_cairn_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_gone,
    Exception: on_failure,
}
"""For `Starlette(exception_handlers=...)`."""
