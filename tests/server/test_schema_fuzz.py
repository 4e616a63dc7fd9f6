"""schemathesis over the server's own description: whatever comes, no 5xx and no hang."""

import collections

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from cairn.server.openapi import describe
from tests.server.fake_api import FakeApi
from tests.server.running import running

SHORT, LONG = 15, 2000
"""Examples per operation; schemathesis adds its systematic ones to the long run."""
FEW_TOKENS = 4
SECONDS = 5.0
HEALTH = list(HealthCheck)

# What a description cannot say (a field that goes with another one, an empty prompt) is refused.
EXCLUDED = [positive_data_acceptance]


SCHEMA = schemathesis.openapi.from_dict(describe())
RANDOM = schemathesis.openapi.from_dict(describe())
RANDOM.config.phases.coverage.enabled = False


def tame(case):
    """Valid bodies name the served model and ask for few tokens; wrong ones stay wrong."""
    body = case.body
    if not isinstance(body, dict) or not case.path.startswith("/v1/"):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and FEW_TOKENS < value < 2**31:
            body[name] = FEW_TOKENS
    given = (body.get("max_tokens"), body.get("max_completion_tokens"))
    if case.path.endswith("/chat/completions") and given == (None, None):
        body["max_tokens"] = FEW_TOKENS


@pytest.fixture(scope="module")
def fake(tokenizer):
    return FakeApi(tokenizer)


@pytest.fixture(scope="module")
def fuzzed(tool_model, tmp_path_factory):
    """A real server for nothing but this."""
    folder = tmp_path_factory.mktemp("fuzzed")
    flags = ("--served-model-name", "tiny", "--max-model-len", "256")
    with running(folder, str(tool_model), *flags) as server:
        yield server, server.engine.pid


@RANDOM.parametrize()
@settings(max_examples=SHORT, suppress_health_check=HEALTH)
def test_without_engine(case, fake):
    tame(case)
    response = case.call(app=fake.app)
    case.validate_response(response, excluded_checks=EXCLUDED)


COUNTS = collections.Counter()


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(max_examples=LONG, suppress_health_check=HEALTH)
def test_real_server(case, fuzzed):
    server, _ = fuzzed
    tame(case)
    response = case.call(base_url=server.url, timeout=SECONDS * 4)
    COUNTS[case.method, case.path, response.status_code] += 1
    assert response.elapsed < SECONDS
    case.validate_response(response, excluded_checks=EXCLUDED)


@pytest.mark.slow
def test_real_server_came_through(fuzzed):
    """The same engine process serves, and the cases were many and not all refused."""
    server, engine = fuzzed
    assert server.engine.pid == engine
    assert server.complete().status_code == 200
    assert server.ledger()["problems"] == []
    served = sum(
        n for (method, _, status), n in COUNTS.items() if (method, status) == ("POST", 200)
    )
    assert sum(COUNTS.values()) >= 10_000, COUNTS
    assert served > 500, COUNTS
