"""Limits on request size, enforced while a request arrives and before it is parsed."""

from __future__ import annotations

import asyncio
import codecs
from typing import Any

import h11
import numpy as np
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from cairn.server.encodings import decoded, decoders
from cairn.server.in_process import replay_body
from cairn.server.options import ServerOptions

BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER_SECONDS = 30.0
"""Time limit for the request head, after which the connection is closed."""
MAX_HEADER_BYTES = 64 * 1024
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    # Before UTF-16, whose byte order mark is a prefix of this one.
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks and their encodings."""
DEPTH_WINDOW = 1 << 20
"""Bytes of a body that are processed at a time to count nesting, to bound memory."""


def check_headers(headers: Headers, options: ServerOptions) -> None:
    """Raise HTTPException (431) for more header lines than allowed."""
    count = len(headers.raw)
    if count > options.max_headers:
        raise HTTPException(
            431, f"the request has {count} header lines, at most {options.max_headers} are allowed"
        )


async def read_body(scope: Scope, receive: Receive, options: ServerOptions) -> Receive:
    """Read and check the body of a request.

    Returns:
        An ASGI `receive` that returns the decompressed body in UTF-8.

    Raises:
        HTTPException: 413 if the body is too long, 408 if it takes too long to arrive, 400 if it is
            nested too deeply or cannot be decoded, 415 for an unknown Content-Encoding.
        ClientDisconnect: the client has disconnected.
    """
    if scope["method"] in BODILESS:
        return receive
    limit, headers = options.max_body_bytes, Headers(scope=scope)
    steps = decoders(",".join(headers.getlist("content-encoding")))
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_long(f"{int(announced)} bytes", limit)
    received = bytearray()
    try:
        async with asyncio.timeout(options.body_timeout):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                received += message.get("body", b"")
                if len(received) > limit:
                    raise _too_long("longer", limit)
                more = message.get("more_body", False)
    except TimeoutError:
        raise _last(
            408, f"the request body did not arrive within {options.body_timeout:g} seconds"
        ) from None
    body = bytes(received)
    if steps:
        body = await asyncio.to_thread(decoded, body, steps, limit)
    body = _as_utf8(body)
    depth = options.max_json_depth
    if nested_deeper(body, depth):
        raise HTTPException(400, f"the request body is nested more than {depth} levels deep")
    return replay_body(body, receive)


def _as_utf8(body: bytes) -> bytes:
    """Convert a body with a byte order mark to UTF-8 without one."""
    for mark, encoding in MARKS:
        if body.startswith(mark):
            try:
                text = body[len(mark) :].decode(encoding)
            except UnicodeDecodeError as error:
                at = error.start + len(mark)
                detail = f"the request body begins as {encoding}, but is none at byte {at}"
                raise HTTPException(400, detail) from None
            return text.encode("utf-8", "surrogatepass")
    return body


def nested_deeper(body: bytes, depth: int) -> bool:
    """Whether JSON text nests brackets deeper than `depth`; brackets in strings do not count.

    Linear in the length of the body and without recursion.
    """
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    # Remove escaped quotes, which do not end a string. Escaped backslashes first: a quote behind
    # one is not escaped.
    plain = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes, level = 0, 0
    for start in range(0, len(plain), DEPTH_WINDOW):
        window = plain[start : start + DEPTH_WINDOW]
        quoted = np.cumsum(window == ord('"'), dtype=np.int32) + quotes
        opens = (window == ord("[")) | (window == ord("{"))
        closes = (window == ord("]")) | (window == ord("}"))
        step = np.where(quoted % 2 == 0, opens.astype(np.int32) - closes, 0)
        levels = np.cumsum(step, dtype=np.int32) + level
        if levels.max() > depth:
            return True
        quotes, level = int(quoted[-1]) % 2, int(levels[-1])
    return False


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for the request head."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first request head."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Process received bytes; start or stop the timer of the head."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._forget_head()

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _too_long(size: str, limit: int) -> HTTPException:
    return _last(413, f"the request body is {size}, at most {limit} bytes are allowed")


def _last(status: int, detail: str) -> HTTPException:
    """An error that also closes the connection, because the rest of the body is not read."""
    return HTTPException(status, detail, {"Connection": "close"})
