"""Which implementations of an op a test can run."""

from __future__ import annotations

from typing import Any

from cairn.ops import gpu
from cairn.ops.implementation import REFERENCE
from cairn.ops.registry import Op


def interpreted(name: str, device: str) -> bool:
    """Whether an implementation runs under the (slow) interpreter."""
    return name == "triton" and device == "cpu"


def runnable_on(op: Op[..., Any], device: str) -> list[str]:
    """Names of the implementations that run on a device, the definition first; on a CPU including
    interpreted kernels."""
    return [
        REFERENCE,
        *(
            name
            for name, implementation in op.implementations.items()
            if device in implementation.devices or (gpu.INTERPRETED and interpreted(name, device))
        ),
    ]
