from starlette.applications import Starlette

from cairn.errors import EngineDead
from cairn.server.health import routes
from tests.server.fake_state import ask, fake_state


def server(**options):
    state = fake_state(**options)
    app = Starlette(routes=routes)
    app.state.server = state
    return state, app


def test_alive_and_ready():
    _, app = server()
    assert ask(app, "GET", "/health").json().keys() == {"status", "uptime_seconds"}
    assert ask(app, "GET", "/ready").json() == {"ready": True}


def test_a_long_step_is_alive_but_not_ready():
    state, app = server(ready_step_age=2.0)
    state.client.step_age = 2.5
    response = ask(app, "GET", "/ready")
    assert response.status_code == 503
    assert "2.5 s" in response.json()["reason"]
    assert ask(app, "GET", "/health").status_code == 200
    state.client.step_age = 1.5
    assert ask(app, "GET", "/ready").status_code == 200


def test_a_dead_engine_is_neither():
    state, app = server()
    state.client.dead = EngineDead("killed by SIGKILL")
    for path in ("/health", "/ready"):
        response = ask(app, "GET", path)
        assert response.status_code == 503
        assert "SIGKILL" in response.json()["reason"]


def test_metrics_are_prometheus_text():
    _, app = server()
    response = ask(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (
        'cairn:startup_seconds{model_name="tiny",phase="weights",replica="0"} 1.5' in response.text
    )
