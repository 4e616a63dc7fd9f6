"""The application as a whole: its description."""

import pytest

from cairn.server import page
from cairn.server.app import routes
from cairn.server.openapi import ENDPOINTS, describe
from tests.server.fake_api import FakeApi


def test_every_route_is_described():
    ours = [route for route in routes if route not in page.routes]
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in ours
        for method in route.methods - {"HEAD"}
    }
    assert served == {(endpoint.path, endpoint.method) for endpoint in ENDPOINTS}


def test_description_is_served_and_whole(api):
    document = api.request("GET", "/openapi.json").json()
    assert document == describe()
    schemas = document["components"]["schemas"]

    def references(node):
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    used = {reference.rsplit("/", 1)[1] for reference in references(document)}
    assert used <= set(schemas)
    assert "ChatRequest" in used


def test_bounds_and_reasons_are_described():
    schemas = describe()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in fields["temperature"]["anyOf"]
    assert fields["audio"]["description"].startswith("Not served")
    assert fields["store"]["description"].startswith("Accepted, without effect")
    assert schemas["ChatRequest"]["additionalProperties"] is False


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/openapi.json"])
def test_the_other_rooms_are_mounted(api, path):
    assert api.request("GET", path).status_code == 200


@pytest.mark.parametrize("slashes", ["/", "//"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 1}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": []}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [104]}),
        ("/v1/models", None),
        ("/v1/models/tiny", None),
        ("/v1/models/other", None),
        ("/openapi.json", None),
        ("/health", None),
        ("/ready", None),
        ("/nowhere", None),
        ("/page/app.js", None),
    ],
)
def test_a_slash_at_the_end_changes_nothing(api, path, body, slashes):
    method = "GET" if body is None else "POST"
    headers = {"Host": "llm.example.com", "X-Forwarded-Proto": "https"}
    plain, slashed = (
        api.request(method, each, json=body, headers=headers) for each in (path, path + slashes)
    )
    assert plain.status_code == slashed.status_code
    assert "location" not in slashed.headers
    same = ("id", "created")
    if plain.headers["content-type"] == "application/json":
        one, other = (
            {k: v for k, v in each.json().items() if k not in same} for each in (plain, slashed)
        )
        assert one == other or path == "/nowhere"


def test_the_key_is_asked_for_with_a_slash_too(tokenizer):
    api = FakeApi(tokenizer, api_keys=("secret",))
    assert api.request("GET", "/v1/models/").status_code == 401
    assert api.request("GET", "/health/").status_code == 200
    assert api.request("GET", "//").status_code == 401
