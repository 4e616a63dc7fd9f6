"""Base class of the families' tables of tuning constants.

The `tuning.py` of a family has a dataclass with a field for each constant, and one instance of it
that the launch code reads. Tests replace constants with `replaced`, so that short inputs run the
code paths of long ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


class Tuning:
    """Base class of the tables; subclasses are dataclasses."""

    @contextlib.contextmanager
    def replaced(self, **constants: Any) -> Iterator[None]:
        """Within the block, some constants have other values. Raises TypeError for an unknown
        name."""
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
