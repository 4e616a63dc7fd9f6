"""Errors in OpenAI's format."""

import pytest

from cairn.errors import BadRequest, Busy, EngineDead, TooLong
from cairn.server.errors import about, body_of, response_of


@pytest.mark.parametrize(
    "error, status, kind, code",
    [
        (BadRequest("no"), 400, "invalid_request_error", None),
        (TooLong("no"), 400, "invalid_request_error", "context_length_exceeded"),
        (Busy("no"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (EngineDead("no"), 503, "service_unavailable_error", None),
    ],
)
def test_shape(error, status, kind, code):
    assert error.http_status == status
    detail = body_of(error).error
    assert (detail.message, detail.type, detail.param, detail.code) == ("no", kind, None, code)


def test_retry_after():
    for error in (Busy("no", retry_after=9), EngineDead("no", None, 9).again()):
        assert response_of(error).headers["retry-after"] == "9"
    assert "retry-after" not in response_of(EngineDead("no")).headers
    assert "retry-after" not in response_of(BadRequest("no")).headers


def test_about_names_the_field_that_has_no_name_yet():
    with pytest.raises(BadRequest) as caught, about("tools"):
        raise BadRequest("no")
    assert caught.value.param == "tools"
    with pytest.raises(BadRequest) as caught, about("tools"), about("regex"):
        raise BadRequest("no")
    assert caught.value.param == "regex"


@pytest.mark.parametrize(
    "method, path, status",
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
def test_unknown_routes_and_methods(api, method, path, status):
    response = api.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert path in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "model": "x" * 5_000_000},
        {"prompt": "a", "x" * 5_000_000: 1},
        {"prompt": "a", "response_format": {"type": "x" * 5_000_000}},
        {"prompt": "a", "stop\n\nx": 1},
    ],
    ids=["model", "field", "kind", "lines"],
)
def test_megabytes_are_not_sent_back(api, body):
    response = api.post("/v1/completions", body)
    assert response.status_code in (400, 404)
    assert len(response.content) < 10_000
    assert response.json()["error"]["param"]


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/responses", "Use /v1/responses"),
        ("GET", "/v1/responses/resp_1", "Answers are not kept"),
        ("POST", "/messages", "Use /v1/messages"),
        ("POST", "/api/chat", "Ollama"),
        ("POST", "/v1/embeddings", "no embeddings"),
        ("POST", "/v1/rerank", "ranks nothing"),
        ("POST", "/v1/audio/transcriptions", "text only"),
        ("POST", "/chat/completions", "Use /v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "Use /v1/chat/completions"),
        ("POST", "/completions", "Use /v1/completions"),
        ("GET", "/models", "Use /v1/models"),
    ],
)
def test_paths_that_are_not_served_say_what_is(api, method, path, words):
    answer = api.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 404
    assert words in answer.json()["error"]["message"]


def test_another_path_has_no_hint(api):
    message = api.request("GET", "/nowhere").json()["error"]["message"]
    assert message == "GET /nowhere: Not Found"
