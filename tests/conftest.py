"""Settings of every test."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when a kernel is defined: it then runs on CPU tensors, one program after the other.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine may take long over one example; the suite has its own time limits.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")
