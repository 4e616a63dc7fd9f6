import base64
import re

import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from cairn.server.admin import create_admin_app
from cairn.server.admin import routes as admin_routes
from cairn.server.app import create_app
from cairn.server.app import routes as api_routes
from cairn.server.auth import check_key
from cairn.server.middleware import wrap
from tests.server.fake_state import ask, fake_state

KEYS = ("first-key", "second-key")


def status(path, authorization=None, keys=KEYS):
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        check_key(path, Headers(headers), keys)
    except HTTPException as refused:
        return refused.status_code
    return 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_every_key_is_accepted(scheme, key):
    assert status("/v1/models", f"{scheme} {key}") == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer first-ke",
        "Bearer first-keys",
        "Bearer first-key second-key",
        "Basic first-key",
        "first-key",
        "Bearer schlüssel",
    ],
)
def test_anything_else_is_refused(authorization):
    assert status("/v1/models", authorization) == 401


def basic(text):
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("user", ["", "anybody", "first-ke"])
def test_a_browser_gives_the_key_as_a_password(user):
    assert status("/v1/models", basic(f"{user}:second-key")) == 200
    assert status("/", basic(f"{user}:second-key")) == 200
    assert status("/", basic(f"{user}:second")) == 401
    assert status("/", basic(user)) == 401
    assert status("/", "Basic first-key") == 401


def test_the_page_asks_the_browser_and_the_api_its_client():
    assert "Basic" in challenge("/")
    assert challenge("/v1/models") == "Bearer"


def challenge(path):
    with pytest.raises(HTTPException) as refused:
        check_key(path, Headers({}), KEYS)
    return refused.value.headers["WWW-Authenticate"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_open_paths(path):
    assert status(path) == 200


@pytest.mark.parametrize(
    "path", ["/", "/health/", "/ready/x", "//", "/metrics", "/page", "/HEALTH"]
)
def test_paths_that_resemble_open_ones_need_the_key(path):
    assert status(path) == 401


def test_without_keys_everybody_is_let_in():
    assert status("/v1/models", None, ()) == 200


def every_call():
    """(application factory, method, path) of all routes."""
    for create, routes in ((create_app, api_routes), (create_admin_app, admin_routes)):
        for route in routes:
            path = re.sub(r"\{[^}]*\}", "x", route.path)
            yield from ((create, method, path) for method in sorted(route.methods))


def answer(create, method, path, key=None):
    state = fake_state(api_keys=KEYS)
    app = create(state) if create is create_app else wrap(create(state), state)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return ask(app, method, path, headers=headers).status_code


@pytest.mark.parametrize(("create", "method", "path"), list(every_call()))
def test_every_route_asks_for_the_key(create, method, path):
    """Only these routes need no key, because load balancers call them."""
    if path in ("/health", "/ready"):
        assert answer(create, method, path) == 200
        return
    assert answer(create, method, path) == 401
    assert answer(create, method, path, "wrong") == 401
    assert answer(create, method, path, "first-key") != 401


def test_unknown_paths_ask_for_the_key_as_well():
    assert answer(create_app, "GET", "/v1/nothing") == 401
    assert answer(create_app, "GET", "/v1/nothing", "second-key") == 404
