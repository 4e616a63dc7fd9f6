"""schemathesis with the server's OpenAPI description, without an engine: no request gives a 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from cairn.server.openapi import describe
from tests.server.fake_api import FakeApi

EXAMPLES = 15
"""Examples per operation."""
FEW_TOKENS = 4
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
HEALTH = list(HealthCheck)

# Rules that a description cannot express (a field that requires another one, an empty prompt).
EXCLUDED = [positive_data_acceptance]

RANDOM = schemathesis.openapi.from_dict(describe())
RANDOM.config.phases.coverage.enabled = False


def tame(case):
    """Valid bodies name the served model and request few tokens; invalid ones stay invalid."""
    body = case.body
    if not isinstance(body, dict) or not case.path.startswith("/v1/"):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    if body.get("prompt") in ("", [""]):
        # Valid if a tokenizer begins texts with a token, which this one does not.
        body["prompt"] = "x"
    for name in LIMITS:
        value = body.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and FEW_TOKENS < value < 2**31 and float(value).is_integer():
            body[name] = FEW_TOKENS
    unlimited = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
    name = unlimited.get(case.path)
    if name is not None and all(body.get(limit) is None for limit in LIMITS):
        body[name] = FEW_TOKENS


@pytest.fixture(scope="module")
def fake(tokenizer):
    return FakeApi(tokenizer)


@RANDOM.parametrize()
@settings(max_examples=EXAMPLES, suppress_health_check=HEALTH)
def test_without_engine(case, fake):
    tame(case)
    response = case.call(app=fake.app)
    case.validate_response(response, excluded_checks=EXCLUDED)
