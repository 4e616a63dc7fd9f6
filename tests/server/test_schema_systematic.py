"""schemathesis with the server's OpenAPI description and a real server: no 5xx and no hang.

To collect this takes seconds, in which the systematic examples are made; see conftest.py.
"""

import collections

import pytest
import schemathesis
from hypothesis import settings

from cairn.server.openapi import describe
from tests.server.running import running
from tests.server.test_schema_fuzz import EXCLUDED, HEALTH, tame

EXAMPLES = 700
"""Random examples per operation, in addition to the systematic ones."""
SECONDS = 5.0

SCHEMA = schemathesis.openapi.from_dict(describe())


@pytest.fixture(scope="module")
def fuzzed(tool_model, tmp_path_factory):
    """A real server for this module only."""
    folder = tmp_path_factory.mktemp("fuzzed")
    flags = ("--served-model-name", "tiny", "--max-model-len", "256")
    with running(folder, str(tool_model), *flags) as server:
        yield server, server.engine.pid


COUNTS = collections.Counter()


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(max_examples=EXAMPLES, suppress_health_check=HEALTH)
def test_real_server(case, fuzzed):
    server, _ = fuzzed
    tame(case)
    response = case.call(base_url=server.url, timeout=SECONDS * 4)
    COUNTS[case.method, case.path, response.status_code] += 1
    assert response.elapsed < SECONDS
    case.validate_response(response, excluded_checks=EXCLUDED)


@pytest.mark.slow
def test_real_server_came_through(fuzzed):
    """The same engine process serves, and there were many cases, not all of them errors."""
    server, engine = fuzzed
    assert server.engine.pid == engine
    assert server.complete().status_code == 200
    assert server.ledger()["problems"] == []
    served = sum(
        n for (method, _, status), n in COUNTS.items() if (method, status) == ("POST", 200)
    )
    assert sum(COUNTS.values()) >= 10_000, COUNTS
    assert served > 500, COUNTS
