"""Kernels that are compiled before they are launched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu, rmsnorm
from cairn.ops.compile_ahead import compile_ahead
from cairn.ops.gpu import tl, triton

pytestmark = pytest.mark.skipif(gpu.async_compile_mode() is None, reason="needs Triton 3.6")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@triton.jit
def doubling_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, 2 * tl.load(x + i))


@triton.jit
def broken_kernel(x, out, N: tl.constexpr):
    tl.static_assert(N < 0, "no such kernel")


def doubled(x: Tensor, kernel: Any = doubling_kernel) -> Tensor:
    out = gpu.empty(x.shape, x.dtype, x.device)
    kernel[(1,)](x, out, len(x))
    return out


def test_rehearsed_work_computes_nothing(device: str) -> None:
    x, made = torch.ones(8, device=device), []
    compile_ahead(lambda: made.append(doubled(x)), workers=2)
    assert made[0].tolist() == [0.0] * 8
    assert doubled(x).tolist() == [2.0] * 8


def test_rehearsed_ops_compute_nothing(device: str) -> None:
    x, weight, made = torch.ones(4, 64, device=device), torch.ones(64, device=device), []
    compile_ahead(lambda: made.append(rmsnorm.using("triton")(x, weight, 1e-6)), workers=2)
    assert not made[0].any()
    torch.testing.assert_close(rmsnorm.using("triton")(x, weight, 0.0), x)


def test_no_rehearsal_with_one_worker_or_under_launch_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = lambda: pytest.fail("has been called")  # noqa: E731
    compile_ahead(work, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "async_compile_mode", lambda: None)
        compile_ahead(work, workers=2)
    monkeypatch.setattr(gpu.watch, "observer", object())
    compile_ahead(work, workers=2)


def test_an_error_of_the_work_is_raised_and_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        compile_ahead(lambda: 1 // 0, workers=2)
    assert gpu.watch.observer is None
    made: list[int] = []
    compile_ahead(lambda: made.append(1), workers=2)
    assert made == [1]


@pytest.mark.gpu
@needs_cuda
def test_later_launches_find_kernels_compiled_by_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    knobs = pytest.importorskip("triton").knobs
    compiled: list[tuple[str, bool]] = []

    def listen(src: Any, **told: Any) -> None:
        own = threading.current_thread() is threading.main_thread()
        compiled.append((src.name, own))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    sizes = [16, 32, 64]
    every = [torch.ones(n, device="cuda") for n in sizes]
    compile_ahead(lambda: [doubled(x) for x in (*every, *every)], workers=2)
    assert compiled == [("doubling_kernel", False)] * len(sizes)
    for x in every:
        assert doubled(x).tolist() == [2.0] * len(x)
    assert len(compiled) == len(sizes)


@pytest.mark.gpu
@needs_cuda
def test_compile_errors_are_raised_at_the_launch() -> None:
    x = torch.ones(16, device="cuda")
    compile_ahead(lambda: doubled(x, broken_kernel), workers=2)
    with pytest.raises(Exception, match="no such kernel"):
        doubled(x, broken_kernel)
