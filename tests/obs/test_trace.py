import json
import sys

import pytest

from cairn.errors import BadConfig
from cairn.obs.trace import Tracer


def test_without_a_target_nothing_is_made():
    tracer = Tracer()
    with tracer.span("name", {}) as span:
        span.attributes["a"] = 1
    tracer.close()
    assert "opentelemetry" not in type(tracer).__module__


def test_spans_in_a_file(tmp_path):
    file = tmp_path / "spans"
    tracer = Tracer(str(file))
    with pytest.raises(ValueError), tracer.span("outer", {}) as span:
        span.attributes["number"] = 3
        raise ValueError("broken")
    tracer.close()
    span = json.loads(file.read_text())
    assert span["name"] == "outer"
    assert span["attributes"] == {"number": 3}
    assert span["status"]["status_code"] == "ERROR"


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(BadConfig, match="nowhere"):
        Tracer(str(tmp_path / "nowhere" / "spans"))


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(BadConfig, match="cairn-llm\\[trace\\]"):
        Tracer("otel")
