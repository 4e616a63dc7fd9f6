"""Drafts in a measurement are right or wrong, as its cases define."""

from __future__ import annotations

import pytest

from cairn.bench import speculation
from cairn.bench.session import Subject
from cairn.bench.speculation import CASES, RANDOM, WRONG, SpeculationPlan, run_speculation
from cairn.errors import BadRequest
from tests.failures.models import folder


def test_copied_text_is_guessed(tmp_path, monkeypatch):
    monkeypatch.setattr(speculation, "TURNS", 1)
    # Independent of measured step times on this machine.
    monkeypatch.setattr(speculation, "Pace", lambda *_: None)
    options = {"device": "cpu", "dtype": "float32", "load_format": "random"}
    subject = Subject(folder(tmp_path))
    plan = SpeculationPlan(subject, 60, (2,), 30, 3, "hsa", options)
    cells = list(run_speculation(plan))
    assert [cell.case for cell in cells] == list(CASES)
    for cell in cells:
        if cell.case == WRONG:
            assert cell.accepted == 0 < cell.drafted
        elif cell.case != RANDOM:
            assert 20 < cell.accepted <= cell.drafted
    with pytest.raises(BadRequest, match="no passage as long as 60"):
        next(run_speculation(SpeculationPlan(subject, 60, (1,), 60, 3, "hsa", options)))
