"""What tests of kernels need that they launch themselves."""

from __future__ import annotations

import pytest

from cairn.ops import gpu


@pytest.fixture
def launches(device: str) -> None:
    """Kernels run: on a GPU, or by the interpreter, which a machine with CUDA does not use."""
    if device == "cpu" and not gpu.INTERPRETED:
        pytest.skip("needs a GPU, or Triton's interpreter")
