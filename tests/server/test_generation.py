"""Requests on the engine: failures, errors, disconnecting clients."""

import asyncio

import pytest

from cairn.errors import EngineDead
from cairn.server.generation import Generation, Work
from cairn.types import KvTransferParams, SamplingParams
from tests.server.fake_api import chat_body, events_of
from tests.server.fake_client import FakeClient
from tests.server.raw import Raw

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BODIES = [(CHAT, chat_body()), (COMPLETE, {"prompt": "hi", "max_tokens": 40})]
FAILED = {"finish_reason": "error", "error": "the logits are no numbers", "status": 500}


@pytest.mark.parametrize("path, body", BODIES)
def test_failure_has_its_status(api, path, body):
    api.client.failure = FAILED
    error = api.error(path, body, 500)
    assert error["message"] == "the logits are no numbers"
    assert error["type"] == "server_error"


def test_failure_of_a_grammar_is_the_requests_own(api):
    api.client.failure = {"finish_reason": "error", "error": "no token fits", "status": 400}
    assert api.error(CHAT, chat_body())["message"] == "no token fits"


def test_failure_without_words(api):
    api.client.failure = {"finish_reason": "error"}
    assert "failed" in api.error(CHAT, chat_body(), 500)["message"]


@pytest.mark.parametrize("path, body", BODIES)
def test_failure_in_a_stream_is_its_last_event(api, path, body):
    api.client.failure = FAILED
    response = api.post(path, body | {"stream": True})
    assert response.status_code == 200
    *events, last = events_of(response.text)
    assert events
    assert all("error" not in event for event in events)
    assert last["error"]["message"] == "the logits are no numbers"
    assert api.client.live == 0


@pytest.mark.parametrize("path, body", BODIES)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_of_every_chunk(api, path, body, n):
    both = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = api.events(path, body | {"stream_options": both, "n": n})
    assert last["choices"] == []
    seen = [event["usage"]["completion_tokens"] for event in events]
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    assert events[-1]["usage"] == last["usage"]
    assert all(
        event["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for event in events
    )
    for event in events:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path, body", BODIES)
def test_usage_of_every_chunk_but_no_last_one(api, path, body):
    for none in ({}, {"include_usage": None}, {"include_usage": False}):
        options = {"continuous_usage_stats": True, **none}
        events = api.events(path, body | {"stream_options": options})
        assert all(event["choices"] and event["usage"] for event in events)
    for nothing in ({}, {"continuous_usage_stats": None, "include_usage": None}):
        events = api.events(path, body | {"stream_options": nothing})
        assert not any("usage" in event for event in events)
    whole = api.events(path, body | {"stream_options": {"include_usage": True}})
    assert [event["usage"] for event in whole[:-1]] == [None] * (len(whole) - 1)


def test_request_taken_back_by_the_server(api):
    api.client.failure = {"finish_reason": "abort"}
    error = api.error(CHAT, chat_body(), 503)
    assert error["type"] == "service_unavailable_error"


def test_one_failure_ends_all_choices(api):
    api.client.failure = FAILED
    api.error(COMPLETE, {"prompt": ["a", "b"], "n": 2}, 500)
    assert len(api.client.aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_busy_says_when_to_come_again(api, stream):
    api.client.busy = True
    response = api.post(CHAT, chat_body(stream=stream))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_a_stream_have_their_status(api, stream):
    error = api.error(COMPLETE, {"prompt": [300], "stream": stream})
    assert error["param"] == "prompt"


def test_dead_engine(api):
    api.client.dead = EngineDead("the engine was killed")
    assert "killed" in api.error(CHAT, chat_body(), 503)["message"]


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_engine_dies_while_it_works(api, prompt):
    api.client.answer = lambda *_: b"x" * 4000
    body = {"prompt": prompt, "max_tokens": 4000}

    async def run(stream):
        raw = Raw(COMPLETE, body | {"stream": stream})
        task = raw.start(api.app)
        if stream:
            await raw.until("data: ")
        while not api.client.live:
            await asyncio.sleep(0.001)
        api.client.die("it was killed")
        await asyncio.wait_for(task, 10)
        return raw

    streamed = asyncio.run(run(True))
    assert (
        streamed.status == 200
        and "it was killed" in events_of(streamed.text)[-1]["error"]["message"]
    )
    api.client.dead = None
    whole = asyncio.run(run(False))
    assert whole.status == 503 and "it was killed" in whole.text


def test_all_prompts_or_none(api):
    error = api.error(COMPLETE, {"prompt": [[1], [2], [300]]})
    assert "300" in error["message"]
    assert len(api.client.submitted) == 2
    assert sorted(api.client.aborted) == sorted(asked.id for asked in api.client.submitted)


def test_more_outputs_than_can_ever_run(api):
    error = api.error(COMPLETE, {"prompt": ["a"] * 33, "n": 2})
    assert "66" in error["message"] and "64" in error["message"]
    assert not api.client.submitted


def test_a_bug_is_a_plain_500(api):
    def broken(*_):
        raise RuntimeError("secret")

    api.client.check = broken
    for stream in (False, True):
        error = api.error(CHAT, chat_body(stream=stream), 500)
        assert "secret" not in error["message"]


def test_every_end_is_counted(api):
    def counts():
        lines = api.state.metrics.render().decode().splitlines()
        values = [line.split() for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in values}

    api.chat(n=2)
    api.complete(max_tokens=2)
    found = counts()
    assert found['cairn:request_success_total{finished_reason="stop",model_name="tiny"}'] == 2
    assert found['cairn:request_success_total{finished_reason="length",model_name="tiny"}'] == 1
    assert found['cairn:e2e_request_latency_seconds_count{model_name="tiny"}'] == 2
    assert found['cairn:time_to_first_token_seconds_count{model_name="tiny"}'] == 3


def leaving(api, path, body, stream, early=False):
    """The client disconnects while it waits for the first token, or after the first token of a
    stream."""

    async def run():
        api.client.hold = asyncio.Event()
        raw = Raw(path, body | {"stream": stream})
        task = raw.start(api.app)
        while not api.client.submitted:
            await asyncio.sleep(0.001)
        if stream and not early:
            api.client.hold.set()
            await raw.until("data: ")
        raw.leave()
        await asyncio.wait_for(task, 10)
        return raw

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", [*BODIES, (COMPLETE, {"prompt": ["a", "b"], "n": 3})])
def test_leaving_cancels(api, path, body, stream):
    api.client.answer = lambda *_: b"x" * 4000
    raw = leaving(api, path, {**body, "max_tokens": 4000}, stream)
    assert sorted(api.client.aborted) == sorted(asked.id for asked in api.client.submitted)
    assert api.client.live == 0
    assert "[DONE]" not in raw.text
    assert b'num_aborts_total{endpoint="' in api.state.metrics.render()


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_is_no_failure(api, caplog, stream):
    """Log and metrics have the status of a disconnected client, and no error."""
    caplog.set_level("INFO")
    raw = leaving(api, CHAT, chat_body(), stream, early=True)
    assert raw.status == 499
    assert b'status="499"' in api.state.metrics.render()
    assert b'status="500"' not in api.state.metrics.render()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_staying_cancels_nothing(api):
    api.chat()
    api.events(CHAT, chat_body(n=2))
    api.complete(["a", "b"])
    assert api.client.aborted == []
    assert b'num_aborts_total{endpoint="' not in api.state.metrics.render()


def test_streams_of_several_prompts_interleave(api):
    events = api.events(COMPLETE, {"prompt": ["a", "b"], "max_tokens": 8})
    order = [event["choices"][0]["index"] for event in events]
    assert order != sorted(order)


@pytest.mark.parametrize("prompt, n", [("a", 2), (["a", "b"], 1)])
def test_a_slow_client_gets_larger_pieces(api, prompt, n):
    api.client.answer = lambda *_: b"x" * 2000

    async def run():
        raw = Raw(COMPLETE, {"prompt": prompt, "n": n, "max_tokens": 2000, "stream": True})
        send, reads = raw.send, asyncio.Event()

        async def slow_send(message):
            await send(message)
            if b"data: " in message.get("body", b""):
                await reads.wait()

        raw.send = slow_send
        task = raw.start(api.app)
        await raw.until("data: ")
        while api.client.live:
            await asyncio.sleep(0)
        reads.set()
        await asyncio.wait_for(task, 10)
        return events_of(raw.text)

    *events, done = asyncio.run(run())
    assert done == "[DONE]"
    # Nothing waits for the client: tokens that the engine adds meanwhile are one piece.
    assert len(events) < 10
    for index in range(2):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "x" * 2000


def test_how_far_the_prompts_are_read(tokenizer):
    client = FakeClient(tokenizer)
    work = Work([[1, 2, 3], [4, 5]], SamplingParams(), 0, "prompt")

    async def run():
        with Generation(client, work, "x") as generation:
            assert generation.reading is None
            first, second = generation._submissions
            first.read, second.read = 3, 1
            return generation.reading

    assert asyncio.run(run()) == b": read 4 of 5 tokens\n\n"


@pytest.mark.parametrize(
    "path, body",
    [
        (COMPLETE, {"prompt": "hi", "max_tokens": 1, "min_tokens": 1}),
        (CHAT, {**chat_body(), "max_tokens": 1, "min_tokens": 1}),
        ("/v1/messages", {**chat_body(), "max_tokens": 1, "min_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
    ],
)
def test_routers_divide_requests_of_all_apis(api, path, body):
    """As vllm-router 0.1.17 does: the answer of the first engine is a field for the second one."""
    absent = dict.fromkeys(("remote_block_ids", "remote_host", "remote_port"))
    keeps = {"kv_transfer_params": {"do_remote_decode": True, **absent}}
    api.client.kept = KvTransferParams(
        do_remote_prefill=True, remote_host="h", remote_port=5, remote_request_id="00"
    )
    given = api.answer(path, body | keeps)["kv_transfer_params"]
    assert api.asked.transfer == KvTransferParams(do_remote_decode=True)
    assert "a stream" in api.error(path, body | keeps | {"stream": True})["message"]
    api.answer(path, body | {"kv_transfer_params": given})
    assert api.asked.transfer == api.client.kept
    api.client.kept = None
    assert "kv_transfer_params" not in api.answer(path, body)
