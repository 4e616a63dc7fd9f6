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
from cairn.server.in_process import replayed
from cairn.server.options import ServerOptions

BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER_SECONDS = 30.0
"""A connection that has not sent a whole request head by then is closed."""
MAX_HEADER_BYTES = 64 * 1024
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    # Checked before UTF-16, whose mark is a prefix of it.
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks and their encodings."""
DEPTH_WINDOW = 1 << 20
"""Bytes whose nesting is counted at once."""


def check_headers(headers: Headers, options: ServerOptions) -> None:
    """Raise HTTPException (431) for more header lines than allowed."""
    count = len(headers.raw)
    if count > options.max_headers:
        raise HTTPException(
            431, f"the request has {count} header lines, at most {options.max_headers} are allowed"
        )


async def read_body(scope: Scope, receive: Receive, options: ServerOptions) -> Receive:
    """Read a request's body within the bounds; returns a `receive` that gives it again.

    Raises:
        HTTPException: 413 too long (at the first byte too many), 408 too slow, 400 nested too
            deeply or not what its Content-Encoding or its byte order mark says, 415 an unknown
            Content-Encoding.
        ClientDisconnect: the client went away.
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
    return replayed(body, receive)


def _as_utf8(body: bytes) -> bytes:
    """A body in UTF-8, without its byte order mark, which gives its encoding."""
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
    """Whether JSON text opens more than `depth` brackets at once, strings left out.

    Linear in the body's length, without recursion, and without looking closer at a body that has
    few brackets at all.
    """
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    # An escaped quote ends no string; escaped backslashes go first, for they escape nothing.
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
    """uvicorn's HTTP/1.1, which also closes connections that never finish a request's head."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes have come; the clock of an unfinished head goes on."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
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
    """An error that closes the connection: the rest of the request body is not read."""
    return HTTPException(status, detail, {"Connection": "close"})
