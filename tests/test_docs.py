"""Generated pages are current, and their sources are complete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import FAMILIES, FEATURES, shows
from tools.docs import configuration, support
from tools.docs.pages import ROOT, texts

PACKAGE = ROOT / "cairn"


def test_generated_pages_are_current() -> None:
    old = [name for name, text in texts().items() if (ROOT / name).read_text("utf-8") != text]
    assert not old, "run: make docs"


def test_every_environment_variable_is_described() -> None:
    read = set()
    for path in PACKAGE.rglob("*.py"):
        read |= set(re.findall(r"\bCAIRN_[A-Z_]+\b", path.read_text("utf-8")))
    assert read == set(configuration.ENVIRONMENT)


def test_every_option_has_a_help_text() -> None:
    for path, command in configuration._commands(configuration.cairn, "cairn"):
        for option in command.params:
            if option.param_type_name == "option":
                assert getattr(option, "help", None), f"{path} {option.name}"


def test_marks_are_read_as_they_are_written(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "test_some.py").write_text(
        '@shows("qwen3 hils", "overlap", "TP")\n@pytest.mark.gpu\ndef test_a(): ...\n'
        '@pytest.mark.parametrize("x", [pytest.param(1, marks=shows("hils", "PD"))])\n'
        "def test_b(x): ...\n"
    )
    (tmp_path / "test_z.py").write_text(
        'pytestmark = pytest.mark.gpu\n@shows("qwen2", "PD")\ndef test_c(): ...\n'
    )
    monkeypatch.setattr(support, "ROOT", tmp_path)
    found = support.proofs(tmp_path)
    assert found.keys() == {
        *(("qwen3", "overlap"), ("qwen3", "TP"), ("hils", "overlap"), ("hils", "TP")),
        *(("hils", "PD"), ("qwen2", "PD")),
    }
    assert found["hils", "TP"] == [support.Proof("test_some.py", "test_a", gpu=True)]
    assert not found["hils", "PD"][0].gpu and found["qwen2", "PD"][0].gpu


def test_a_mark_names_known_families_and_features() -> None:
    assert shows("hils", "overlap").args == ("hils", "overlap")
    for families, features in (("bert", ["TP"]), ("hils", ["speed"]), ("", ["TP"]), ("hils", [])):
        with pytest.raises(ValueError, match="shows()"):
            shows(families, *features)
    assert all(
        family in FAMILIES and feature in FEATURES
        for family, feature in support.proofs(support.TESTS)
    )


def test_the_gpu_suite_runs_what_a_cell_says_of_a_gpu() -> None:
    ran = subprocess.run(
        ["make", "-n", "test-gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    words = ran.stdout.split()
    for found in support.proofs(support.TESTS).values():
        for proof in found:
            assert not proof.gpu or any(proof.file.startswith(word) for word in words), proof
