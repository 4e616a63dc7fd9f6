import asyncio
import json
import logging

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from cairn.obs import log
from cairn.obs.trace import Tracer
from cairn.server.health import routes as health_routes
from cairn.server.middleware import wrap
from tests.server.fake_state import ask, fake_state


async def echo(request: Request):
    body = await request.body()
    return JSONResponse({"body": body.decode(), "id": log.request_id.get()})


async def stream(request: Request):
    async def pieces():
        for i in range(3):
            yield f"{i}"
            await asyncio.sleep(0)

    return StreamingResponse(pieces())


async def broken(request: Request):
    raise RuntimeError("a bug")


async def left(request: Request):
    raise ClientDisconnect


def server(**options):
    state = fake_state(**options)
    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]),
            Route("/stream", stream),
            Route("/broken", broken),
            Route("/left", left),
            Route("/item/{name}", stream),
            *health_routes,
        ]
    )
    app.state.server = state
    return state, wrap(app, state)


def test_a_request_id_is_given_back_and_known_inside():
    _, app = server()
    response = ask(app, "POST", "/echo", content="hi", headers={"X-Request-Id": "mine-1"})
    assert response.json() == {"body": "hi", "id": "mine-1"}
    assert response.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "line\x1b[31m"])
def test_a_bad_request_id_is_replaced(given):
    _, app = server()
    response = ask(app, "GET", "/stream", headers={"X-Request-Id": given})
    made = response.headers["x-request-id"]
    assert made != given and made.isalnum() and len(made) == 32


def test_refusals_carry_a_request_id_and_the_usual_shape():
    _, app = server(api_keys=("k",))
    response = ask(app, "GET", "/stream")
    assert response.status_code == 401
    assert response.headers["x-request-id"]
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("change", "word"), [({"loaded": False}, "loading"), ({"draining": True}, "shutting down")]
)
def test_a_closed_server_answers_503(change, word):
    state, app = server()
    for name, value in change.items():
        setattr(state, name, value)
    response = ask(app, "GET", "/stream")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert word in response.json()["error"]["message"]
    assert ask(app, "GET", "/health").status_code == 200
    assert ask(app, "GET", "/metrics").status_code == 200
    ready = ask(app, "GET", "/ready")
    assert ready.status_code == 503
    assert word in ready.json()["reason"]


def test_too_many_headers():
    _, app = server(max_headers=20)
    many = {f"x-{i}": "1" for i in range(30)}
    response = ask(app, "GET", "/stream", headers=many)
    assert response.status_code == 431
    assert "20" in response.json()["error"]["message"]


def test_too_long_a_body_never_reaches_the_handler():
    _, app = server(max_body_bytes=1024)
    response = ask(app, "POST", "/echo", content=b"x" * 1025)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/stream", "/broken", "/left", "/missing"])
def test_open_requests_are_counted_down_whatever_happens(path):
    state, app = server()
    ask(app, "GET", path)
    assert state.open_requests == 0


def test_open_requests_are_counted_while_they_run():
    state, app = server()
    seen = []

    async def watching(message):
        seen.append(state.open_requests)

    async def nothing():
        await asyncio.sleep(60)

    scope = {"type": "http", "method": "GET", "path": "/stream", "headers": [], "query_string": b""}
    asyncio.run(app(scope, nothing, watching))
    assert set(seen) == {1} and len(seen) >= 4
    assert state.open_requests == 0


def counted(state):
    lines = state.metrics.render().decode().splitlines()
    return {line for line in lines if line.startswith("cairn:http_requests_total")}


def test_answers_are_counted_by_route():
    state, app = server()
    for path in ("/item/a", "/item/b", "/missing", "/broken", "/left"):
        ask(app, "GET", path)
    name = (
        'cairn:http_requests_total{{endpoint="{}",method="GET",model_name="tiny",status="{}"}} {}'
    )
    assert counted(state) == {
        name.format("/item/{name}", 200, "2.0"),
        name.format("other", 404, "1.0"),
        name.format("/broken", 500, "1.0"),
        name.format("/left", 499, "1.0"),
    }


def test_methods_of_a_client_s_own_making_are_one_label():
    state, app = server()
    ask(app, "BREW", "/stream")
    assert 'method="other"' in counted(state).pop()


def test_access_log(caplog):
    _, app = server()
    with caplog.at_level(logging.INFO, "cairn.access"):
        ask(app, "GET", "/item/a%0Ab", headers={"X-Request-Id": "mine-2"})
        ask(app, "GET", "/health")
    (record,) = caplog.records
    assert record.fields["status"] == 200
    assert record.fields["bytes"] == 3
    assert record.fields["path"] == "/item/a%0Ab"
    assert "GET /item/a%0Ab 200" in record.getMessage()


def test_spans(tmp_path):
    state, app = server()
    state.tracer = Tracer(str(tmp_path / "spans"))
    parent = "0af7651916cd43dd8448eb211c80319c"
    ask(app, "GET", "/item/a", headers={"traceparent": f"00-{parent}-b7ad6b7169203331-01"})
    ask(app, "GET", "/broken")
    ask(app, "GET", "/health")
    state.tracer.close()
    good, bad = map(json.loads, (tmp_path / "spans").read_text().splitlines())
    assert good["context"]["trace_id"] == f"0x{parent}"
    assert good["attributes"]["http.route"] == "/item/{name}"
    assert good["attributes"]["http.response.status_code"] == 200
    assert bad["status"]["status_code"] == "ERROR"


@pytest.mark.parametrize("path", ["/item/a", "/llm/item/a", "/llm/v1/item/a/"])
def test_the_path_of_a_proxy(path):
    root = "/llm/v1" if "v1" in path else "/llm"
    _, app = server(root_path=root)
    assert ask(app, "GET", path).status_code == 200
    assert ask(app, "GET", "/llmx/item/a").status_code == 404
    assert ask(app, "GET", root + root + "/item/a").status_code == 404
