"""Settings of every test."""

from __future__ import annotations

from hypothesis import settings

# A busy machine may take long over one example; the suite has its own time limits.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")
