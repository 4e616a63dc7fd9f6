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
