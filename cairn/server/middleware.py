"""Middleware of all routes: request id, access log, Host header, API key, limits."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.obs import log
from cairn.obs.trace import Tracer
from cairn.server import auth, limits
from cairn.server.errors import CLIENT_GONE, error_response
from cairn.server.host_header import HostCheck
from cairn.server.state import ServerState

access = logging.getLogger("cairn.access")

OPERATIONS = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are served in every state, without a trace span and with a debug-level log line."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_TRACER = Tracer()
ANY_HOST = HostCheck()
REQUEST_ID = re.compile(r"[!-~]{1,128}")


def wrap(
    app: ASGIApp, state: ServerState, hosts: HostCheck = ANY_HOST, origins: Sequence[str] = ()
) -> ASGIApp:
    """Wrap an application in the middleware. It is plain ASGI, so streams are not buffered.

    Args:
        app: the application with the routes.
        state: state of the server.
        hosts: check of the Host header.
        origins: origins that CORS allows ("*" for all). Their preflight requests need no API key,
            because browsers cannot send one.
    """
    guarded: ASGIApp = _RequestGuard(app, state, hosts)
    if origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return _PathNormalizer(_RequestLogger(guarded, state), state.options.root_path)


class _PathNormalizer:
    """Removes a trailing slash and the root path of a proxy from the request's path.

    A redirect instead would have a wrong address behind a proxy.
    """

    def __init__(self, app: ASGIApp, root: str = "") -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if self._root and f"{path}/".startswith(f"{self._root}/"):
            path = path[len(self._root) :] or "/"
            scope = {**scope, "path": path}
        path = path.rstrip("/")
        if path:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


@dataclass(slots=True)
class _Answer:
    status: int = 0
    size: int = 0


class _RequestLogger:
    """Sets the request id, and records the trace span, metrics and access log of a request."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _Answer()

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            else:
                answer.size += len(message.get("body", b""))
            await send(message)

        began = time.perf_counter()
        token = log.request_id.set(request_id)
        tracer = NO_TRACER if scope["path"] in OPERATIONS else self._state.tracer
        try:
            with tracer.span(f"{scope['method']} {scope['path']}", headers) as span:
                try:
                    await self._app(scope, receive, observed)
                except ClientDisconnect:
                    answer.status = CLIENT_GONE
                finally:
                    status = answer.status or 500
                    span.attributes = {
                        "http.request.method": scope["method"],
                        "http.route": _route(scope),
                        "http.response.status_code": status,
                        "cairn.request_id": request_id,
                    }
                    span.failed = status >= 500
        finally:
            self._report(scope, answer, time.perf_counter() - began)
            log.request_id.reset(token)

    def _report(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        status = answer.status or 500
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._state.metrics.answered(_route(scope), method, status)
        level = logging.DEBUG if scope["path"] in OPERATIONS else logging.INFO
        if not access.isEnabledFor(level):
            return
        client = scope.get("client") or ("-",)
        # The percent-encoded path cannot contain line breaks or terminal escapes.
        path = scope.get("raw_path", b"").decode("ascii", "replace")
        fields = {
            "client": client[0],
            "method": scope["method"],
            "path": path,
            "status": status,
            "milliseconds": round(seconds * 1e3, 1),
            "bytes": answer.size,
        }
        text = "%s %s %s %d %.1fms %dB"
        access.log(level, text, *fields.values(), extra={"fields": fields})


class _RequestGuard:
    """Refuses requests with a wrong Host, key, header or body, and counts the open ones."""

    def __init__(self, app: ASGIApp, state: ServerState, hosts: HostCheck) -> None:
        self._app = app
        self._state = state
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, headers, path = self._state, Headers(scope=scope), scope["path"]
        try:
            self._hosts.check(path, headers)
            auth.check_key(path, headers, state.options.api_keys)
            limits.check_headers(headers, state.options)
            # The chat page is served while the model loads, and shows that it loads.
            if path in OPERATIONS or path in auth.PAGE_PATHS:
                await self._app(scope, receive, send)
                return
            self._check_open()
            state.open_requests += 1
            try:
                receive = await limits.read_body(scope, receive, state.options)
                await self._app(scope, receive, send)
            finally:
                state.open_requests -= 1
        except HTTPException as refused:
            answer = error_response(refused.status_code, refused.detail, headers=refused.headers)
            await answer(scope, receive, send)

    def _check_open(self) -> None:
        """Raise HTTPException (503) while the model loads or the server shuts down."""
        if self._state.draining:
            raise HTTPException(503, "the server is shutting down", {"Retry-After": "5"})
        if not self._state.loaded:
            raise HTTPException(503, "the model is loading", {"Retry-After": "5"})


def _route(scope: Scope) -> str:
    """The path pattern of the route, which bounds the label values of metrics; else "other"."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"
