"""ASGI requests that do not come from a connection, or whose body was read before."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive

Headers = list[tuple[bytes, bytes]]


async def post(
    app: ASGIApp, path: str, headers: Headers, body: bytes
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the application's answer to a POST; the client never leaves.

    Args:
        app: the application.
        path: of the URL.
        headers: with lower-case names; the length of the body is set here.
        body: of the request.
    """
    status, answered, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def send(message: Message) -> None:
        nonlocal status, answered
        if message["type"] == "http.response.start":
            status, answered = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": with_length(headers, len(body)),
        "client": None,
        "server": None,
    }
    await app(scope, replayed(body, _never), send)
    return status, answered, b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a request body which was read before, then what `receive` gives."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _never() -> Message:
    return await asyncio.Future[Message]()


def with_length(headers: Headers, length: int) -> Headers:
    """Headers that give this length of the body, in bytes."""
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
