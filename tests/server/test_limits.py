import asyncio
import json
import random

import pytest
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cairn.server import limits
from cairn.server.limits import BoundedProtocol, nested_deeper, read_body
from cairn.server.options import ServerOptions

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


def depth_of(value):
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, inner), default=0)
    return 0


def random_json(rng, level):
    kind = rng.randrange(4) if level else 3
    if kind == 0:
        return [random_json(rng, level - 1) for _ in range(rng.randrange(3))]
    if kind == 1:
        return {random_text(rng): random_json(rng, level - 1) for _ in range(rng.randrange(3))}
    return random_text(rng)


def random_text(rng):
    return "".join(rng.choice('[]{}"\\a\\"') for _ in range(rng.randrange(8)))


@pytest.mark.parametrize("window", [1, 7, 1 << 20])
def test_depth_is_that_of_the_parsed_value(monkeypatch, window):
    monkeypatch.setattr(limits, "DEPTH_WINDOW", window)
    rng = random.Random(0)
    for _ in range(300):
        value = [random_json(rng, 8), random_json(rng, 8)]
        body = json.dumps(value).encode()
        depth = depth_of(value)
        assert not nested_deeper(body, depth)
        assert nested_deeper(body, depth - 1)


def test_a_bomb_of_brackets_is_seen():
    assert nested_deeper(b"[" * 1_000_000, 64)
    assert nested_deeper(b'{"a":' * 100_000, 64)
    assert not nested_deeper(b"[" + b"[]," * 1_000_000 + b"1]", 64)


def read(messages, scope=SCOPE, **options):
    """The body that a handler gets from these ASGI messages, and how many of them were read."""
    taken = 0

    async def receive():
        nonlocal taken
        if taken == len(messages):
            await asyncio.sleep(60)
        taken += 1
        return messages[taken - 1]

    async def run():
        again = await read_body(scope, receive, ServerOptions(**options))
        return await again()

    try:
        return asyncio.run(run()), taken
    except HTTPException as refused:
        return refused, taken


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_within_bounds_is_given_whole():
    message, _ = read([part(b'{"a":'), part(b" 1}", more=False)])
    assert message == part(b'{"a": 1}', more=False)


def test_too_long_is_refused_at_the_first_byte_too_many():
    refused, taken = read([part(b"x" * 1000), part(b"x" * 25), part(b"x")], max_body_bytes=1024)
    assert refused.status_code == 413
    assert "1024" in refused.detail
    assert taken == 2


def test_too_long_by_its_own_account_is_not_read_at_all():
    scope = {**SCOPE, "headers": [(b"content-length", b"5000")]}
    refused, taken = read([part(b"x")], scope, max_body_bytes=1024)
    assert (refused.status_code, taken) == (413, 0)
    assert "5000" in refused.detail


def test_too_slow_is_refused():
    refused, _ = read([part(b"{")], body_timeout=0.05)
    assert refused.status_code == 408


def test_a_connection_with_bytes_that_nobody_reads_is_not_used_again():
    for messages in ([part(b"{")], [part(b"x" * 2000)]):
        refused, _ = read(messages, body_timeout=0.05, max_body_bytes=1024)
        assert refused.headers == {"Connection": "close"}


def test_a_client_that_goes_away_while_it_sends():
    with pytest.raises(ClientDisconnect):
        read([part(b"{"), {"type": "http.disconnect"}])


def test_too_deep_is_refused():
    refused, _ = read([part(b"[" * 70 + b"]" * 70, more=False)], max_json_depth=64)
    assert refused.status_code == 400
    assert "64" in refused.detail
    message, _ = read([part(b"[" * 64 + b"]" * 64, more=False)], max_json_depth=64)
    assert message["body"].startswith(b"[[[")


def test_a_head_that_never_ends_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)

    async def app(scope, receive, send):
        await asyncio.sleep(0.8)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def talk(port, *parts):
        """What the server sends until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.1)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()

    async def run():
        config = uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        listener = await asyncio.get_running_loop().create_server(
            lambda: BoundedProtocol(config, server.server_state, {}), "127.0.0.1", 0
        )
        port = listener.sockets[0].getsockname()[1]
        head = b"GET / HTTP/1.1\r\nConnection: close\r\nHost: "
        answers = await asyncio.gather(
            talk(port), talk(port, head), talk(port, *[b"G"] * 5), talk(port, head, b"x\r\n\r\n")
        )
        listener.close()
        return answers

    silent, half, slow, whole = asyncio.run(run())
    assert (silent, half, slow) == (b"", b"", b"")
    assert whole.startswith(b"HTTP/1.1 204")
