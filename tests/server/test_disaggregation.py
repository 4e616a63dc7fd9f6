"""A prefill server and a decode server, with the requests of a router."""

from __future__ import annotations

import os
import signal
from operator import itemgetter

import httpx
import pytest

from tests.engine.children import MODEL
from tests.server.running import running

FLAGS = ("--kv-host-memory", "16MiB", "--dtype", "float32", "--device", "cpu")
PROMPT = "The river goes down to the sea, and the sea goes up to the sky again. " * 4
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REQUESTS = (
    {"temperature": 0},
    {"temperature": 1, "seed": 5, "n": 3, "logprobs": 2},
    {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2, "guided_json": SCHEMA},
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    mode, port = "--disaggregation-mode", ("--disaggregation-bootstrap-port", "0")
    first, second = (tmp_path_factory.mktemp(name) for name in ("prefill", "decode"))
    with (
        running(first, str(MODEL), *FLAGS, mode, "prefill", *port) as prefill,
        running(second, str(MODEL), *FLAGS, mode, "decode") as decode,
    ):
        yield prefill, decode


def routed(prefill, decode, path="/v1/completions", limit="max_tokens", **body):
    """The requests of a router: the prompt to one server, then the request to the other."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
    once = {**body, limit: 1, "kv_transfer_params": asked}
    given = httpx.post(prefill.url + path, json=once, timeout=60).json()["kv_transfer_params"]
    # vllm-router adds fields of other engines to the parameters.
    other = {"no_stop_trim": False} if path.endswith("completions") else {}
    rest = {**body, "kv_transfer_params": given, **other}
    return httpx.post(decode.url + path, json=rest, timeout=60).json()


def response_text(answer) -> str:
    return answer["output"][0]["content"][0]["text"]


def failures(server) -> dict[str, float]:
    """By reason."""
    lines = server.get("/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("cairn:kv_load_failures_total{"))
    return {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


@pytest.mark.slow
def test_two_servers_answer_as_one(servers):
    prefill, decode = servers
    for number, fields in enumerate(REQUESTS):
        body = {"prompt": f"{number} {PROMPT}", "max_tokens": 12, **fields}
        got = routed(*servers, **body)
        alone = prefill.complete(**body).json()
        assert got["choices"] == alone["choices"]
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        assert "kv_transfer_params" not in alone
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0}
    got = routed(*servers, path="/v1/chat/completions", **chat)
    alone = httpx.post(prefill.url + "/v1/chat/completions", json=chat, timeout=60).json()
    assert got["choices"] == alone["choices"]
    messages = [{"role": "user", "content": f"m {PROMPT}"}]
    for path, limit, given, text in (
        ("/v1/responses", "max_output_tokens", {"input": f"r {PROMPT}"}, response_text),
        ("/v1/messages", "max_tokens", {"messages": messages}, itemgetter("content")),
    ):
        body = {**given, limit: 6, "temperature": 0}
        got = routed(*servers, path=path, limit=limit, **body)
        assert text(got) == text(httpx.post(prefill.url + path, json=body, timeout=60).json())
    assert got["usage"]["cache_read_input_tokens"] > 64
    asked = {"do_remote_decode": True}
    for fields, message in (
        ({"stream": True, "kv_transfer_params": asked}, "the answer is a stream"),
        ({"prompt": ["a", "b"], "kv_transfer_params": asked}, "there are 2"),
    ):
        answer = prefill.complete(**fields)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    refused = decode.complete(kv_transfer_params=asked)
    assert refused.status_code == 400 and "keeps no pages" in refused.json()["error"]["message"]
    assert not failures(decode)


@pytest.mark.slow
def test_a_dead_server_that_decodes_leaves_nothing(servers, tmp_path):
    """The other server continues, and keeps no pages for it."""
    prefill, survivor = servers
    body = {"prompt": f"left {PROMPT}", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    asked = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    with running(tmp_path, str(MODEL), *FLAGS, "--disaggregation-mode", "decode") as decode:
        first, second = (prefill.complete(**asked).json()["kv_transfer_params"] for _ in range(2))
        taken = {**body, "kv_transfer_params": first, "stream": True}
        with httpx.stream("POST", f"{decode.url}/v1/completions", json=taken, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            assert "error" not in next(lines)
            os.kill(decode.engine.pid, signal.SIGKILL)
            assert any('"error"' in line for line in lines)
        decode.wait_end()
    assert prefill.ledger()["problems"] == []
    # Its next ticket is used by another server.
    got = survivor.complete(**{**body, "max_tokens": 5}, kv_transfer_params=second).json()
    assert got["choices"] == prefill.complete(**{**body, "max_tokens": 5}).json()["choices"]
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    assert prefill.ledger()["problems"] == [] and not failures(survivor)


@pytest.mark.slow
def test_a_dead_server_is_done_without(servers):
    prefill, decode = servers
    body = {"prompt": f"dead {PROMPT}", "max_tokens": 5, "temperature": 0}
    asked = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    given = prefill.complete(**asked).json()["kv_transfer_params"]
    alone = prefill.complete(**body).json()
    os.kill(prefill.engine.pid, signal.SIGKILL)
    prefill.wait_end()
    got = decode.complete(**body, kv_transfer_params=given).json()
    assert got["choices"] == alone["choices"]
    decode.wait_for(lambda: failures(decode) == {"connection": 1})
    assert decode.ledger()["problems"] == []
