"""`python -m cairn` runs the command."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_is_the_command():
    ran = subprocess.run(
        [sys.executable, "-m", "cairn", "--version"], check=True, capture_output=True, text=True
    )
    assert ran.stdout.startswith("cairn, version ")
    wrong = subprocess.run(
        [sys.executable, "-m", "cairn", "nothing"], check=False, capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "nothing" in wrong.stderr
