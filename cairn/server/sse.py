"""Responses and server-sent event streams that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.errors import CairnError
from cairn.server.errors import INTERNAL, body_of, error_body, error_response, response_of

log = logging.getLogger(__name__)

T = TypeVar("T")

PING_SECONDS = 10.0
"""Seconds without data after which a comment is sent, so that proxies keep the connection open."""
NEWS_SECONDS = 1.0
"""Seconds without data after which a comment reports the progress of the prefill."""
PING = b": still working\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Turn off response buffering in nginx.
    "x-accel-buffering": "no",
}


def event(body: msgspec.Struct) -> bytes:
    """Encode a server-sent event with JSON data."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it if the client disconnects.

    Raises ClientDisconnect then, after `work` has ended.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await other


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams server-sent events.

    An error before the first event becomes a response with its own status, a later one becomes the
    last event, `{"error": ...}`. The generator is closed when the client disconnects.

    Args:
        events: encoded events, as `event` returns them.
        news: returns a progress comment to send while there is no event, or None.

    Raises (when run):
        ClientDisconnect: the client disconnected before the first event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        news: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        super().__init__(headers=HEADERS)
        # The length of a stream is unknown.
        del self.headers["content-length"]
        self._events = events
        self._news = news
        self._started = False
        self._last = time.monotonic()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        try:
            await cancel_on_disconnect(receive, self._run(scope, receive, send))
        except ClientDisconnect:
            # Before the first byte, the middleware logs the status of a disconnected client.
            if not self._started:
                raise

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        pings = asyncio.create_task(self._ping(send))
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
            await self._send(send, b"", more=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must hear of it
            await self._fail(error, scope, receive, send)
        finally:
            pings.cancel()

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        async with self._turn:
            if not self._started:
                self._started = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": self.raw_headers,
                    }
                )
            self._last = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _ping(self, send: Send) -> None:
        step, told = min(NEWS_SECONDS, PING_SECONDS), self._news()
        while True:
            quiet = time.monotonic() - self._last
            news = self._news()
            if quiet >= NEWS_SECONDS and news is not None and news != told:
                told = news
                await self._send(send, news)
            elif quiet >= PING_SECONDS:
                await self._send(send, PING)
            await asyncio.sleep(max(step - quiet % step, step / 10))

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        known = isinstance(error, CairnError)
        if not known:
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
        if self._started:
            body = body_of(error) if isinstance(error, CairnError) else error_body(500, INTERNAL)
            await self._send(send, event(body), more=False)
        else:
            self._started = True
            response = (
                response_of(error)
                if isinstance(error, CairnError)
                else error_response(500, INTERNAL)
            )
            await response(scope, receive, send)
