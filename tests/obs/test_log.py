import json
import logging

import pytest

from cairn.errors import BadConfig
from cairn.obs import log


@pytest.fixture(autouse=True)
def restored_level():
    logger = logging.getLogger("cairn")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_level_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("CAIRN_LOG", "info")
    log.configure()
    log.configure()
    log.get_logger("cairn.test").info("two\nlines")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("INFO    cairn.test: two | lines")


def test_quiet_by_default(monkeypatch, capsys):
    monkeypatch.delenv("CAIRN_LOG", raising=False)
    log.configure()
    log.get_logger("cairn.test").info("not shown")
    assert capsys.readouterr().err == ""


def test_unknown_level_is_refused():
    with pytest.raises(BadConfig, match="loud"):
        log.configure("loud")


def test_json_lines(monkeypatch, capsys):
    monkeypatch.setenv("CAIRN_LOG_FORMAT", "json")
    log.configure("info")
    token = log.request_id.set("mine")
    log.get_logger("cairn.test").info("two\nlines of %s", "text", extra={"fields": {"status": 200}})
    log.request_id.reset(token)
    try:
        raise ValueError("why")
    except ValueError:
        log.get_logger("cairn.test").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "cairn.test",
        "message": "two\nlines of text",
        "request_id": "mine",
        "status": 200,
    }
    assert "ValueError: why" in second["exception"]
    assert "request_id" not in second


def test_text_lines_name_the_request(capsys):
    log.configure("info")
    token = log.request_id.set("mine")
    log.get_logger("cairn.test").info("hello")
    log.request_id.reset(token)
    assert capsys.readouterr().err.endswith("cairn.test: hello [mine]\n")


def test_unknown_format_is_refused(monkeypatch):
    monkeypatch.setenv("CAIRN_LOG_FORMAT", "xml")
    with pytest.raises(BadConfig, match="xml"):
        log.configure("info")


def test_warnings_of_libraries_go_the_same_way(capsys):
    library = logging.getLogger("some_library")
    log.configure("error", also=("some_library",))
    library.info("not shown")
    library.warning("shown")
    library.handlers.clear()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("some_library: ")[1] for line in lines] == ["shown"]
