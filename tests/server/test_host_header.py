"""Checks of the Host header."""

import pytest

from cairn.server.admin import create_admin_app
from cairn.server.app import create_app
from cairn.server.host_header import HostCheck
from cairn.server.middleware import wrap
from tests.server.fake_state import ask, fake_state


def status(named, /, *, address="127.0.0.1", path="/nothing", **options):
    state = fake_state(**options)
    app = create_app(state, HostCheck.of(state.options, address))
    return ask(app, "GET", path, headers={"Host": named}).status_code


LOCAL = ["localhost", "LOCALHOST:8000", "localhost.:80", "127.0.0.1:8000", "127.8.9.1"]
LOCAL += ["[::1]:8000", "[::1]"]
FOREIGN = ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "192.168.0.7"]
FOREIGN += ["[::2]:8000", "[::1].evil.example", "", ":8000", "box.lan"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_on_loopback_only_loopback_is_answered(address):
    assert [status(host, address=address) for host in LOCAL] == [404] * len(LOCAL)
    assert [status(host, address=address) for host in FOREIGN] == [403] * len(FOREIGN)


def test_the_configured_host_is_answered():
    assert status("my-box:8000", host="My-Box") == 404
    assert status("[::1]:8000", host="::1", address="::1") == 404
    assert status("other-box:8000", host="my-box") == 403


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "192.168.0.7"])
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_with_a_list_all_others_are_refused(address, keys):
    options = {"allowed_hosts": ("Box.lan", "10.0.0.7", "[fe80::7]"), "api_keys": keys}
    answered = 401 if keys else 404
    for host in ("box.lan", "box.lan:8000", "10.0.0.7:1", "[fe80::7]:8000", "localhost"):
        assert status(host, address=address, **options) == answered
    for host in ("evil.example", "other.box.lan", "10.0.0.8"):
        assert status(host, address=address, **options) == 403


def test_every_name_is_answered_where_none_can_be_known():
    assert status("box.lan:8000", address="0.0.0.0") == 404
    assert status("box.lan:8000", address="192.168.0.7") == 404
    assert status("box.lan:8000", allowed_hosts=("*",)) == 404
    assert status("box.lan:8000", api_keys=("secret",)) == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_load_balancers_are_answered(path):
    assert status("10.1.2.3", path=path) == 200


def test_a_refusal_says_what_to_do():
    state = fake_state()
    app = create_app(state, HostCheck.of(state.options, "127.0.0.1"))
    error = ask(app, "GET", "/v1/models", headers={"Host": "evil.example:8000"}).json()["error"]
    assert error["type"] == "permission_error"
    assert "'evil.example:8000'" in error["message"] and "--allowed-hosts" in error["message"]
    long = ask(app, "GET", "/v1/models", headers={"Host": "x" * 5000})
    assert long.status_code == 403 and len(long.text) < 1000


def test_admin_routes_are_checked():
    state = fake_state(host="0.0.0.0")
    app = wrap(create_admin_app(state), state, HostCheck.of(state.options, "127.0.0.1"))
    for host, answered in (("evil.example", 403), ("localhost:8001", 404)):
        assert ask(app, "GET", "/admin", headers={"Host": host}).status_code == answered
