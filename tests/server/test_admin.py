import pytest

from cairn.errors import BadRequest
from cairn.server.admin import create_admin_app
from cairn.server.middleware import wrap
from tests.server.fake_state import ask, fake_state


def server(**options):
    state = fake_state(**options)
    calls = []

    async def call(method, **arguments):
        calls.append((method, arguments))
        if arguments.get("steps") == 999:
            raise BadRequest("steps must be an integer in [1, 200], not 999")
        return {"method": method, "trace": b"\x1f\x8b"} if method == "profile" else {"pages": 3}

    state.client.call = call
    return calls, wrap(create_admin_app(state), state)


def test_flush_and_ledger():
    calls, app = server()
    assert ask(app, "POST", "/admin/flush_cache").json() == {"pages": 3}
    assert ask(app, "GET", "/admin/cache").json() == {"pages": 3}
    assert calls == [("flush_cache", {}), ("cache", {})]


def test_profile():
    calls, app = server()
    assert ask(app, "POST", "/admin/profile").json() == {"method": "profile", "trace": "H4s="}
    ask(app, "POST", "/admin/profile", json={"steps": 3, "seconds": 1.5})
    assert calls == [
        ("profile", {"steps": 10, "seconds": 60.0}),
        ("profile", {"steps": 3, "seconds": 1.5}),
    ]


@pytest.mark.parametrize("body", ['{"steps": 999}', '{"steps": "3"}', '{"stepps": 3}', "["])
def test_a_bad_profile_request_is_refused(body):
    _, app = server()
    response = ask(app, "POST", "/admin/profile", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/admin/flush_cache", "/admin/profile"])
def test_pages_in_a_browser_are_not_obeyed(path):
    calls, app = server()
    response = ask(app, "POST", path, headers={"Origin": "http://evil.example"})
    assert (response.status_code, calls) == (403, [])


def test_the_key_is_asked_for_here_as_well():
    calls, app = server(api_keys=("k",))
    assert ask(app, "POST", "/admin/flush_cache").status_code == 401
    assert calls == []
    allowed = {"Authorization": "Bearer k"}
    assert ask(app, "POST", "/admin/flush_cache", headers=allowed).status_code == 200


def test_get_does_not_change_anything():
    calls, app = server()
    assert ask(app, "GET", "/admin/flush_cache").status_code == 405
    assert calls == []
