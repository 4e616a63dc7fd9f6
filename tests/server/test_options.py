import pytest

from cairn.errors import BadConfig, BadRequest
from cairn.server.options import ServerOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("port", "8000"),
        ("admin_port", 70000),
        ("allowed_hosts", ("",)),
        ("allowed_hosts", ("*.example.com",)),
        ("allowed_hosts", ("box:8000",)),
        ("allowed_hosts", ("http://box",)),
        ("api_keys", ("",)),
        ("api_keys", ("two words",)),
        ("api_keys", ("schlüssel",)),
        ("served_model_name", " "),
        ("served_model_name", ""),
        ("served_model_name", ("a", "")),
        ("max_waiting", -1),
        ("max_body_bytes", 10),
        ("max_json_depth", 0),
        ("max_headers", 0),
        ("max_prompts", 0),
        ("max_stop", 0),
        ("max_n", 0),
        ("max_logprobs", -1),
        ("max_selection_tokens", -1),
        ("body_timeout", 0),
        ("shutdown_timeout", -1),
        ("shutdown_timeout", float("inf")),
        ("ready_step_age", 0),
        ("step_limit", float("nan")),
        ("tool_parser", "none"),
        ("reasoning_parser", "tool"),
        ("root_path", "llm"),
        ("root_path", "/llm/"),
        ("allowed_origins", ("example.com",)),
        ("allowed_origins", ("https://example.com/",)),
        ("allowed_origins", ("https://Example.com",)),
        ("allowed_origins", ("https://*.example.com",)),
        ("allowed_origins", ("",)),
        ("allowed_origins", ("https://a.com,https://b.com",)),
        ("sampling_defaults", "vllm"),
        ("log_format", "xml"),
        ("trace", ""),
    ],
)
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(BadConfig, match=name.replace("api_keys", "API key")):
        ServerOptions(**{name: value})


def test_ports_must_differ():
    with pytest.raises(BadConfig, match="admin_port is 8000"):
        ServerOptions(port=8000, admin_port=8000)
    with pytest.raises(BadConfig, match="65535"):
        ServerOptions(port=65535)
    assert ServerOptions(port=65535, admin_port=0).admin_port == 0


def test_limits_of_zero_where_they_mean_something():
    assert ServerOptions(max_waiting=0, shutdown_timeout=0, max_logprobs=0, port=0)


def test_unknown_option_names_the_nearest():
    with pytest.raises(BadRequest, match="max_waiting"):
        ServerOptions(max_wating=3)
