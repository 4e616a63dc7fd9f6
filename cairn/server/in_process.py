"""ASGI requests made in this process, and requests whose body has already been read."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive

Headers = list[tuple[bytes, bytes]]


async def post(
    app: ASGIApp, path: str, headers: Headers, body: bytes
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Call an application with a POST request, whose client never disconnects.

    Args:
        app: the application.
        path: path of the URL.
        headers: headers with lower-case names; content-length is added.
        body: body of the request.

    Returns:
        Status, headers and body of the response.
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
        "headers": with_content_length(headers, len(body)),
        "client": None,
        "server": None,
    }
    await app(scope, replay_body(body, _never), send)
    return status, answered, b"".join(parts)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that returns `body` first, then the messages of `receive`."""
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


def with_content_length(headers: Headers, length: int) -> Headers:
    """The headers with content-length set to `length` bytes."""
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
