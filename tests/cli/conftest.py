import io
import sys

import pytest

from cairn.cli.main import main
from tests.fake_llm import FakeLLM


@pytest.fixture
def llms(monkeypatch):
    """Commands create fake LLMs, which are collected in this list."""
    made = []

    def make(model=None, **options):
        made.append(FakeLLM(model, options))
        return made[-1]

    monkeypatch.setattr("cairn.llm.LLM", make)
    return made


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line; returns (exit code, stdout, stderr)."""

    def call(*arguments, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        shown = capsys.readouterr()
        return end.value.code, shown.out, shown.err

    return call
