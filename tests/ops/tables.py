"""Tables of tuning constants for tests."""

from __future__ import annotations

from typing import Any, Protocol

from cairn.ops.tuning import Tuning


class Tuned(Protocol):
    """Gives a table other constants until the test is done: `tuned(TUNING, fused_chunk=8)`."""

    def __call__(self, table: Tuning, **constants: Any) -> None: ...
