"""README's example of the kernels prints what stands below it."""

import contextlib
import io
import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"
EXAMPLE = re.compile(
    r"## The kernels by themselves\n\n```python\n(.*?)```.*?```\n(.*?)```", re.DOTALL
)


def test_the_kernels_by_themselves(monkeypatch):
    code, printed = EXAMPLE.search(README.read_text(encoding="utf-8")).groups()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, README, "exec"), {})
    assert out.getvalue() == printed
