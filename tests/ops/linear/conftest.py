"""Fixtures of the tests of matrix products."""

from __future__ import annotations

import pytest

from cairn.ops import gpu
from cairn.ops.testing import Make


@pytest.fixture
def make(device: str) -> Make:
    """Generator of arguments for kernels, on the GPU or interpreted."""
    if device == "cpu" and not gpu.INTERPRETED:
        pytest.skip("needs Triton, and a machine without CUDA")
    return Make(device)
