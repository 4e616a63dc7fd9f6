"""Kernels declare the arguments that they read before `await_previous`."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import cairn.ops
from cairn.ops import gpu, linear, linear_add, pdl_checks, rmsnorm, rmsnorm_add
from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, launch_next
from tests.ops.launches import as_if_pdl

pytestmark = pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
interpreted = pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton's interpreter")


def kernels() -> dict[str, Any]:
    """All kernels of ops that may be launched with PDL."""
    found = {}
    for module in pkgutil.walk_packages(cairn.ops.__path__, "cairn.ops."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and "PDL" in getattr(value, "arg_names", ()):
                found[name] = value
    return found


def test_kernels_declare_what_they_read_early() -> None:
    found = kernels()
    assert "tile_kernel" in found
    for kernel in found.values():
        pdl_checks.expect_declared(kernel)


@triton.jit
def first_of(pointer):
    return tl.load(pointer)


@triton.jit(early=())
def undeclared_kernel(x, weight, out, PDL: tl.constexpr):
    launch_next(PDL)
    factor = first_of(weight + tl.program_id(0))
    await_previous(PDL)
    tl.store(out, tl.load(x) * factor)


@triton.jit(early=("x", "weight"))
def overstated_kernel(x, weight, out, PDL: tl.constexpr):
    factor = first_of(weight)
    await_previous(PDL)
    tl.store(out, tl.load(x) * factor)


@triton.jit
def silent_kernel(x, out, PDL: tl.constexpr):
    await_previous(PDL)
    tl.store(out, tl.load(x))


@triton.jit(early=())
def half_waiting_kernel(x, out, PDL: tl.constexpr):
    if tl.program_id(0) == 0:
        await_previous(PDL)
    tl.store(out, tl.load(x))


@pytest.mark.parametrize(
    "kernel, read",
    [
        (undeclared_kernel, r"early=\[\], .*reads \['weight'\]"),
        (overstated_kernel, r"early=\['weight', 'x'\], .*reads \['weight'\]"),
        (silent_kernel, r"early=None, .*reads \[\]"),
        (half_waiting_kernel, r"early=\[\], .*reads \['x'\]"),
    ],
)
def test_a_wrong_declaration_is_found(kernel: Any, read: str) -> None:
    with pytest.raises(AssertionError, match=read):
        pdl_checks.expect_declared(kernel)


def test_effects_of_kernels() -> None:
    found = pdl_checks.effects_of(undeclared_kernel)
    assert (found.writes, found.waits, found.starts_next) == ({"out"}, True, "before")
    found = pdl_checks.effects_of(overstated_kernel)
    assert (found.early, found.starts_next) == ({"weight"}, "after")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_pdl(monkeypatch)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product by a kernel that reads its weight early."""
    return linear.using("triton_few")(x, weight)


@interpreted
def test_a_launch_behind_one_that_writes_what_it_reads_early_is_refused(early: None) -> None:
    x, weight, ones = torch.randn(1, 32), torch.randn(16, 32), torch.ones(32)
    with pdl_checks.checked():
        normed = rmsnorm.using("triton")(x, ones)
        product(normed, weight)
        weight = rmsnorm.using("triton")(weight, ones)
        with pytest.raises(AssertionError, match="reads 'weight' before rmsnorm_kernel"):
            product(x, weight)


@interpreted
def test_a_kernel_that_starts_the_next_before_it_waits_hides_none_in_front(early: None) -> None:
    x, residual, ones = torch.randn(1, 32), torch.randn(1, 32), torch.ones(32)
    square = torch.randn(32, 32)
    with pdl_checks.checked():
        written = torch.randn(16, 32)
        rmsnorm_add.using("triton")(torch.randn(16, 32), written, ones)
        linear_add.using("triton_few")(x, residual, square)
        with pytest.raises(AssertionError, match="before rmsnorm_add_kernel"):
            product(x, written)
        # After a kernel that waits before it calls launch_next, all earlier kernels have finished.
        rmsnorm_add.using("triton")(torch.randn(16, 32), written, ones)
        rmsnorm.using("triton")(x, ones)
        product(x, written)
