"""/openapi.json: the OpenAPI description, generated from the request and response structs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.server.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from cairn.server.protocol.common import ErrorBody
from cairn.server.protocol.completions import CompletionRequest, CompletionResponse
from cairn.server.protocol.messages import (
    CountRequest,
    MessageEvent,
    MessageResponse,
    MessagesRequest,
    TokenCount,
)
from cairn.server.protocol.responses import ResponsesAnswer, ResponsesEvent, ResponsesRequest
from cairn.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from cairn.version import __version__

REFERENCE = "#/components/schemas/{name}"
ERRORS = {
    400: "A request that can never be served; `param` names the field.",
    401: "No API key, or a wrong one.",
    404: "A model that is not served.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not sent as JSON, or in an unknown encoding.",
    429: "The server is full; Retry-After gives the seconds to wait.",
    431: "Too many headers.",
    500: "The engine failed on this request.",
    503: "The server is loading, shutting down, or has lost its engine.",
}
WITHOUT_BODY = (401, 404, 431, 500, 503)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An operation of the API.

    Attributes:
        path, method: path and method of the route.
        summary: one line.
        answer: struct of the response; None if it is not JSON or has no struct.
        body: struct of the request body; None if there is none.
        event: struct of a stream's events; None if the operation does not stream.
        media_type: media type of the response.
        open: needs no API key.
    """

    path: str
    method: str
    summary: str
    answer: type[Struct] | None = None
    body: type[Struct] | None = None
    event: type[Struct] | None = None
    media_type: str = "application/json"
    open: bool = False


ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions",
        "post",
        "Generates the assistant's next message of a conversation.",
        ChatResponse,
        ChatRequest,
        ChatChunk,
    ),
    Endpoint(
        "/v1/completions",
        "post",
        "Continues a text.",
        CompletionResponse,
        CompletionRequest,
        CompletionResponse,
    ),
    Endpoint(
        "/v1/messages",
        "post",
        "Generates the next message, in Anthropic's Messages API.",
        MessageResponse,
        MessagesRequest,
        MessageEvent,
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        "post",
        "Counts the tokens of a conversation.",
        TokenCount,
        CountRequest,
    ),
    Endpoint(
        "/v1/responses",
        "post",
        "Generates a response, in OpenAI's Responses API; nothing is stored.",
        ResponsesAnswer,
        ResponsesRequest,
        ResponsesEvent,
    ),
    Endpoint("/v1/models", "get", "The served model.", ModelList),
    Endpoint("/v1/models/{name}", "get", "The served model by its name.", ModelCard),
    Endpoint("/tokenize", "post", "Token ids of a prompt.", TokenizeResponse, TokenizeRequest),
    Endpoint("/detokenize", "post", "Text of token ids.", DetokenizeResponse, DetokenizeRequest),
    Endpoint(
        "/tokenizer_info",
        "get",
        "Class, special tokens and chat template of the tokenizer.",
        TokenizerInfo,
    ),
    Endpoint("/health", "get", "200 while the engine runs.", open=True),
    Endpoint("/ready", "get", "200 while the server takes new requests.", open=True),
    Endpoint("/metrics", "get", "Prometheus metrics.", media_type="text/plain"),
    Endpoint("/openapi.json", "get", "This description."),
)


def describe(endpoints: Sequence[Endpoint] = ENDPOINTS) -> dict[str, Any]:
    """The OpenAPI 3.1 document as a dict."""
    structs = [
        struct
        for each in endpoints
        for struct in (each.body, each.answer, each.event)
        if struct is not None
    ]
    _, components = msgspec.json.schema_components([*structs, ErrorBody], ref_template=REFERENCE)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cairn",
            "version": __version__,
            "description": "OpenAI-compatible server of long-context language models.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": _responses(endpoint)}
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(endpoint.body)}},
        }
    if "{name}" in endpoint.path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if not endpoint.open:
        # Optional, because a server without keys needs none.
        operation["security"] = [{"key": []}, {}]
    return operation


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    answer = _reference(endpoint.answer) if endpoint.answer is not None else {}
    content: dict[str, Any] = {endpoint.media_type: {"schema": answer}}
    if endpoint.event is not None:
        data = {
            "type": "string",
            "description": (
                f"{endpoint.event.__name__} as JSON. The last event's is [DONE], or an ErrorBody "
                "for a failure on the way."
            ),
        }
        schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"schema": schema}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    errors = ERRORS if endpoint.body is not None else {code: ERRORS[code] for code in WITHOUT_BODY}
    error = {"schema": {} if endpoint.open else _reference(ErrorBody)}
    for code, text in errors.items():
        responses[str(code)] = {
            "description": text,
            "content": {"application/json": error},
        }
    return responses


def _reference(struct: type[Struct]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=struct.__name__)}


@cache
def _document() -> bytes:
    return msgspec.json.encode(describe())


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return Response(_document(), media_type="application/json")


routes = [Route("/openapi.json", openapi, methods=["GET"])]
