"""Calls of ops whose arguments are not checked.

The checks of an op (`@op.check`) cost a decode step on the CPU as much as a matrix product, since
each call finds its code outside the instruction cache. The runner passes arguments that follow from
the model's config and from its own tables, so it switches checks off.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Calls(threading.local):
    """Whether calls of ops by this thread are unchecked."""

    unchecked = False


calls = _Calls()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Within the block, ops that this thread calls do not check their arguments."""
    before = calls.unchecked
    calls.unchecked = True
    try:
        yield
    finally:
        calls.unchecked = before
