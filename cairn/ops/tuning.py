"""What the families' tables of tuning constants share.

A family's `tuning.py` has one dataclass with a field for each constant, and one instance of it that
the launch code reads. Tests pass other numbers with `replaced`, which makes short inputs take the
ways that long ones take.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


class Tuning:
    """Base of the tables; a subclass is a dataclass."""

    @contextlib.contextmanager
    def replaced(self, **constants: Any) -> Iterator[None]:
        """Within the block, the table has other values. Raises TypeError for an unknown name."""
        fields = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if unknown := constants.keys() - fields:
            raise TypeError(f"{type(self).__name__} has no constant {sorted(unknown)[0]!r}")
        before = {name: getattr(self, name) for name in constants}
        try:
            for name, value in constants.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)
