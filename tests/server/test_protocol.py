"""Invalid request bodies: always a 4xx response that names the error."""

import json

import msgspec
import pytest
from msgspec import inspect

from cairn.errors import BadRequest
from cairn.server.openapi import ENDPOINTS
from cairn.server.protocol.chat import ChatRequest
from cairn.server.protocol.completions import CompletionRequest
from cairn.server.protocol.fields import read
from cairn.server.protocol.tokens import TokenizeRequest
from tests.server.fake_api import FakeApi, chat_body

POSTS = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
}
IMPOSSIBLE = ("1e308", "-1e308", "1e999", "NaN", "Infinity", "-Infinity", "9" * 30, "9" * 5000)
ODD = ("-0.0000001", "1e-320", "0", "-1", "1.0", "true", '"1"', "[]", "{}")


@pytest.fixture(scope="module")
def api(tokenizer):
    return FakeApi(tokenizer)


def post(api, path, body, kind="application/json"):
    return api.request("POST", path, content=body, headers={"Content-Type": kind})


def number_fields():
    for path, struct in (
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
    ):
        for field in msgspec.structs.fields(struct):
            (schema,), _ = msgspec.json.schema_components([field.type])
            kinds = {each.get("type") for each in schema.get("anyOf", [schema])}
            if kinds & {"integer", "number"}:
                yield path, field.encode_name


@pytest.mark.parametrize("path, name", [*number_fields()])
def test_odd_numbers(api, path, name):
    """A numeric field accepts only values that the engine accepts."""
    rest = json.dumps(POSTS[path])[:-1]
    for number in (*IMPOSSIBLE, *ODD):
        response = post(api, path, f'{rest}, "{name}": {number}}}')
        allowed = (400,) if number in IMPOSSIBLE else (200, 400)
        assert response.status_code in allowed, (number, response.text)
    for asked in api.client.submitted:
        msgspec.msgpack.encode(asked.params)
    api.client.submitted.clear()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{",
        b'{"prompt": "hi"',
        b"{}",
        b"\xff\xfe\x00",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udc00\\ud800"}]}',
        b'{"\\ud800": 1}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"tools": ' + b'[{"a":' * 900 + b"1" + b"}]" * 900 + b"}",
        b'{"prompt": "' + b"x" * 10_000_000 + b'", "model": "other"}',
        b'{"tokens": [' + b"9," * 2_000_000 + b"-1]}",
        b'{"messages": "hi", "prompt": 3, "tokens": 4}',
        b'{"messages": [{"role": "nobody", "content": "x"}], "prompt": {}, "tokens": {}}',
    ],
    ids=lambda body: repr(body[:24]) if isinstance(body, bytes) else body,
)
def test_no_request(api, path, body):
    response = post(api, path, body)
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"]


@pytest.mark.parametrize("depth", [500, 100_000])
def test_depth_without_the_servers_own_bound(depth):
    """The parser itself survives deeper nesting than the limit allows."""
    text = b'{"prompt": "a", "suffix": ' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(BadRequest):
        read(text, CompletionRequest)


def test_ten_megabytes_of_text(api):
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    error = post(api, "/v1/completions", body).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(api, kind):
    """Requests that a website can make a browser send without a preflight."""
    response = post(api, "/v1/completions", b'{"prompt": "hi"}', kind)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_content_type_may_have_parameters(api):
    kind = "application/JSON; charset=utf-8"
    assert post(api, "/v1/completions", b'{"prompt": "hi"}', kind).status_code == 200


@pytest.mark.parametrize(
    "body, param, text",
    [
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
        (
            {"messages": [{"role": "user", "content": "x", "nam": 1}]},
            "messages[0].nam",
            "not a field",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "toolcalls": []}]},
            "messages[0].toolcalls",
            "Did you mean 'tool_calls'?",
        ),
        ({"temperature": 3}, "temperature", "temperature is 3: expected `float` <= 2"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"response_format": {}}, "response_format.type", "missing"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"stop": [""]}, "stop[0]", ">= 1"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "int"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "\"xml\": it is none of 'text', 'json_object', 'json_schema'",
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
            "Known there: type, function",
        ),
        ({"cairn": {"selections": True}}, "cairn.selections", "not a field"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "custom"),
    ],
)
def test_errors_name_the_field(body, param, text):
    with pytest.raises(BadRequest) as caught:
        read(json.dumps(chat_body() | body).encode(), ChatRequest)
    assert caught.value.param == param
    assert text in str(caught.value)


EXTRAS = {
    "type": "text",
    "id": "m1",
    "status": "completed",
    "timestamp": 1.5,
    "created_at": "now",
    "model": "m",
    "prefix": True,
    "reasoning_details": [{}],
    "thinking_blocks": [],
    "cache_control": {"type": "ephemeral"},
    "provider_specific_fields": {},
    "finish_reason": "stop",
    "usage": {},
    "x" * 100: None,
}


@pytest.mark.parametrize("name", EXTRAS)
def test_histories_hold_fields_of_the_programs_that_keep_them(name):
    extra = {name: EXTRAS[name]}
    call = {"function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}, "index": 0}
    text = {"type": "text", "text": "x"}
    other = {} if name in ("type", "id") else extra
    given = [
        {"role": "system", "content": "x", **extra},
        {"role": "user", "content": [text | other], **extra},
        {"role": "assistant", "content": None, "tool_calls": [call | other], **extra},
        {"role": "tool", "content": "x", **extra},
    ]
    plain = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [text]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "x"},
    ]
    for kind in (ChatRequest, TokenizeRequest):
        read_ones = read(json.dumps({"messages": given}).encode(), kind)
        assert read_ones == read(json.dumps({"messages": plain}).encode(), kind)


@pytest.mark.parametrize(
    "path, name", [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")]
)
def test_a_field_that_is_missing_is_named(api, path, name):
    assert api.error(path, {})["param"] == name


@pytest.mark.parametrize(
    "kind, value",
    [("input_audio", {"data": "x"}), ("file", {"file_id": "x"})],
)
def test_sounds_and_files_are_refused_by_name(api, kind, value):
    part = {"type": kind, kind: value}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    error = api.error("/v1/chat/completions", body)
    assert error["param"] == f"messages[0].content[1].{kind}"
    assert "text and images only" in error["message"]


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.body], ids=lambda e: e.path)
def test_a_tag_is_never_left_out(endpoint):
    """msgspec does not require the tag of the only struct in a union; the OpenAPI description
    does."""
    seen, left = set(), [inspect.type_info(endpoint.body)]
    while left:
        kind = left.pop()
        if isinstance(kind, inspect.Metadata):
            left.append(kind.type)
            continue
        members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        structs = [each for each in members if isinstance(each, inspect.StructType)]
        assert len(structs) != 1 or structs[0].tag is None, structs[0].cls
        for each in members:
            if isinstance(each, inspect.StructType) and each.cls not in seen:
                seen.add(each.cls)
                left += [field.type for field in each.fields]
            elif isinstance(each, inspect.ListType):
                left.append(each.item_type)
            elif isinstance(each, inspect.DictType):
                left.append(each.value_type)
            elif isinstance(each, inspect.Metadata):
                left.append(each.type)
