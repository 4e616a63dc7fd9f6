"""Event streams and waiting clients, without the rest of the server."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from cairn.errors import BadRequest
from cairn.server import sse
from cairn.server.sse import EventStream, cancel_on_disconnect
from tests.server.raw import Raw


def run_stream(events, leave_after=None, news=lambda: None):
    async def run():
        raw = Raw("/", {})
        await raw.receive()
        task = raw.start(EventStream(events(), news))
        if leave_after is not None:
            await raw.until(leave_after)
            raw.leave()
        await asyncio.wait_for(task, 10)
        return raw

    return asyncio.run(run())


def test_events_go_out_at_once():
    async def events():
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    raw = run_stream(events)
    assert [m["type"] for m in raw.sent] == ["http.response.start", *["http.response.body"] * 3]
    assert raw.text == "data: 1\n\ndata: 2\n\n"
    assert not raw.sent[-1]["more_body"]
    headers = dict(raw.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers


def test_error_before_the_first_event_is_an_answer():
    async def events():
        raise BadRequest("wrong")
        yield b""

    raw = run_stream(events)
    assert raw.status == 400 and '"wrong"' in raw.text


@pytest.mark.parametrize("error, text", [(BadRequest("wrong"), "wrong"), (OSError("x"), "log")])
def test_error_after_the_first_event_is_the_last_one(error, text):
    async def events():
        yield b"data: 1\n\n"
        raise error

    raw = run_stream(events)
    assert raw.status == 200
    assert raw.text.startswith('data: 1\n\ndata: {"error"') and text in raw.text
    assert not raw.sent[-1]["more_body"]


def test_leaving_closes_the_events():
    closed = []

    async def events():
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    run_stream(events, leave_after="data: 1")
    assert closed


def test_silence_is_filled_with_comments(monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)

    async def events():
        await asyncio.sleep(0.2)
        yield b"data: 1\n\n"

    raw = run_stream(events)
    assert raw.text.startswith(": ")
    assert raw.text.endswith("data: 1\n\n")
    assert sum(m["type"] == "http.response.start" for m in raw.sent) == 1


def test_news_are_told_once_each(monkeypatch):
    monkeypatch.setattr(sse, "NEWS_SECONDS", 0.02)
    told = [None]

    async def events():
        await asyncio.sleep(0.1)
        for count in (1, 2):
            told[0] = b": read %d\n\n" % count
            await asyncio.sleep(0.2)
        yield b"data: 1\n\n"

    raw = run_stream(events, news=lambda: told[0])
    assert raw.text == ": read 1\n\n: read 2\n\ndata: 1\n\n"


def test_no_comments_between_busy_events(monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 5.0)

    async def events():
        for _ in range(20):
            await asyncio.sleep(0)
            yield b"data: 1\n\n"

    assert ": " not in run_stream(events).text.replace("data: ", "")


def test_work_of_a_client_that_left_is_cancelled():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def run():
        raw = Raw("/", {})
        raw.leave()
        with pytest.raises(ClientDisconnect):
            await cancel_on_disconnect(raw.receive, work())

    asyncio.run(run())
    assert ended


def test_result_and_error_of_work():
    async def work(error=None):
        if error:
            raise error
        return 3

    async def run():
        assert await cancel_on_disconnect(Raw("/", {}).receive, work()) == 3
        with pytest.raises(BadRequest):
            await cancel_on_disconnect(Raw("/", {}).receive, work(BadRequest("no")))

    asyncio.run(run())
