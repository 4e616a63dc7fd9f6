"""CORS: websites whose pages may call the API."""

import pytest

from tests.server.fake_api import FakeApi, chat_body

PAGE = "https://chat.example.com"
OTHER = "https://other.example.com"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/ready")


def preflight(api, path="/v1/chat/completions", origin=PAGE, **headers):
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return api.request("OPTIONS", path, headers=asked | headers)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keys", [(), ("secret",)])
@pytest.mark.parametrize("origins", [(PAGE, OTHER), ("*",)])
def test_a_preflight_needs_no_key(tokenizer, path, keys, origins):
    api = FakeApi(tokenizer, api_keys=keys, allowed_origins=origins)
    answer = preflight(api, path)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in answer.headers["access-control-allow-methods"]
    for name in ("authorization", "content-type", "x-stainless-os"):
        assert name in answer.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    ("body", "key", "status"),
    [(chat_body(), "secret", 200), (chat_body(), "wrong", 401), ({}, "secret", 400)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_may_be_read(tokenizer, body, key, status, stream):
    api = FakeApi(tokenizer, api_keys=("secret",), allowed_origins=(PAGE,))
    headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
    path = "/v1/chat/completions"
    answer = api.request("POST", path, json=body | {"stream": stream}, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "Origin" in answer.headers["vary"]


def test_other_sites_stay_out(tokenizer):
    api = FakeApi(tokenizer, allowed_origins=(PAGE,))
    near = (f"{PAGE}:8443", f"{PAGE}.evil.com", PAGE.replace("https", "http"))
    for origin in (OTHER, "null", *near):
        answer = preflight(api, origin=origin)
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
        answer = api.request("GET", "/v1/models", headers={"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers


def test_off_by_default(tokenizer):
    api = FakeApi(tokenizer)
    answer = preflight(api)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    answer = api.request("GET", "/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
