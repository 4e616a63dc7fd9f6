"""Kernels are compiled for Hopper wherever Triton is, with a GPU or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cairn.ops import gpu

MAX_SHARED = 227 << 10
"""Bytes of shared memory that a program can have."""
FEW_SPILT = 512
"""Bytes that a group may put away: before its loop and after it, or a few numbers in it."""


SPILT = {
    "group_scores_kernel": FEW_SPILT,
    "latent_groups_kernel": 16,
    "cells_groups_kernel": 16,
}
GROUPS = {
    "latent_groups_kernel",
    "cells_groups_kernel",
    "flash_groups_kernel",
    "group_scores_kernel",
    "linear_groups_kernel",
}


@pytest.mark.skipif(gpu.gl is None, reason="needs Triton 3.6")
def test_launches_compile_and_keep_products_in_flight() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ops.hopper"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {one["kernel"] for one in found} == GROUPS
    for one in found:
        assert one["shared"] <= MAX_SHARED, one
        # The compiler serializes wgmma if other instructions read the accumulators.
        assert not one["serialized"], one
        assert one["spilt"] <= SPILT.get(one["kernel"], 0), one
