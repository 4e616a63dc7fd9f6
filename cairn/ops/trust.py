"""Calls of ops whose arguments need no look.

The looks that an op takes first (`@op.check`) cost a decode step on the CPU, whose every call finds
its code out of the caches, as much as a product. What a loaded model hands to its ops follows from
its config and the cache's own tables.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Calls(threading.local):
    """What this thread's calls of ops are."""

    trusted = False


calls = _Calls()


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Within it, ops that this thread calls do not look at their arguments."""
    before = calls.trusted
    calls.trusted = True
    try:
        yield
    finally:
        calls.trusted = before
