"""OpenAI batch files with scripted outputs."""

from __future__ import annotations

import asyncio
import json

from cairn.server.batch import answer_lines
from tests.server.fake_client import WORDS

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def line(name, body, url="/v1/chat/completions", **fields):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **fields})


def results(api, lines, width=4):
    written = []
    counts = asyncio.run(answer_lines(api.app, lines, written.append, width))
    assert all(text.endswith("\n") and "\n" not in text[:-1] for text in written)
    found = {}
    for text in written:
        result = json.loads(text)
        assert result["id"].startswith("batch_req_")
        found.setdefault(result["custom_id"], []).append(result)
    return counts, found


def test_requests_of_several_routes(api):
    given = [
        line("a", CHAT),
        "\n",
        line("b", {"prompt": ["x", "y"]}, "/v1/completions"),
        line("c", {**CHAT, "max_tokens": 3}, "/v1/messages"),
        line("d", {"input": "hi"}, "/v1/responses"),
    ]
    counts, found = results(api, given)
    assert (counts.answered, counts.failed) == (4, 0)
    (chat,) = found["a"]
    assert chat["error"] is None and chat["response"]["status_code"] == 200
    assert chat["response"]["request_id"]
    message = chat["response"]["body"]["choices"][0]["message"]
    assert message["content"] == WORDS.decode()
    assert len(found["b"][0]["response"]["body"]["choices"]) == 2
    assert found["c"][0]["response"]["body"]["stop_reason"] == "max_tokens"
    assert found["d"][0]["response"]["body"]["object"] == "response"


def test_lines_that_are_no_requests(api):
    given = [
        "{oops",
        json.dumps({"custom_id": "a"}),
        line("b", CHAT, "/v1/files"),
        line("c", CHAT, method="GET"),
        line("d", {**CHAT, "stream": True}),
        line("e", CHAT),
        line("e", CHAT),
        line("f", {**CHAT, "tempratur": 1}),
    ]
    counts, found = results(api, given)
    assert (counts.answered, counts.failed) == (1, 7)
    for name, word in (("b", "/v1/files"), ("c", "GET"), ("d", "stream")):
        (result,) = found[name]
        assert result["response"] is None and word in result["error"]["message"]
    assert sorted(r["error"] is None for r in found["e"]) == [False, True]
    (refused,) = found["f"]
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "tempratur"
    assert len(found[None]) == 2


def test_a_line_waits_for_room(api, monkeypatch):
    monkeypatch.setattr("cairn.server.batch.BUSY_SECONDS", 0.01)
    api.client.bound = 1
    counts, found = results(api, [line(f"l{i}", CHAT) for i in range(5)], width=5)
    assert (counts.answered, len(found)) == (5, 5)
