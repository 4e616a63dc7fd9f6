"""Fixtures of ops' tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.landmark.tuning import TUNING as LANDMARK_TUNING
from cairn.ops.registry import Op
from cairn.ops.tuning import Tuning
from cairn.train import sequence as _registered  # noqa: F401  (its op is tested like the others)
from tests.ops.replays import Compiled, in_order
from tests.ops.tables import Tuned


@pytest.fixture(scope="session", autouse=True)
def few_tokens_share_pages() -> Iterator[None]:
    """Interpreted kernels sort the pages of few tokens: each of them takes 10 ms."""
    with contextlib.ExitStack() as stack:
        if gpu.INTERPRETED:
            stack.enter_context(LANDMARK_TUNING.replaced(page_sharing_tokens=40))
        yield


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops choose as on a GPU; kernels are interpreted and give what launches them again."""
    if not gpu.INTERPRETED:
        pytest.skip("needs Triton, and a machine without CUDA")
    interpreter = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    interpret = interpreter.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        with torch.utils._python_dispatch._disable_current_modes():
            interpret(kernel, *args, grid=grid, warmup=warmup, **options)
        given, rest = in_order(kernel, args, options)
        return Compiled(lambda *a, **k: interpret(kernel, *a, **k), given, rest)

    def select(op: Op[..., Any], call: Call) -> Any:
        *others, last = op.candidates("cuda")
        return next((i for i in others if i.accepts(call)), last)

    monkeypatch.setattr(interpreter, "run", run)
    monkeypatch.setattr(Op, "_select", select)
    monkeypatch.setattr(gpu, "stream_of", lambda device: "stream")


@pytest.fixture
def tuned() -> Iterator[Tuned]:
    """Fixture of `Tuned`."""
    with contextlib.ExitStack() as stack:

        def replace(table: Tuning, **constants: Any) -> None:
            stack.enter_context(table.replaced(**constants))

        yield replace


@pytest.fixture
def launches(device: str) -> None:
    """Skips where kernels do not run: on the CPU they need Triton's interpreter, which a machine
    with CUDA does not use."""
    if device == "cpu" and not gpu.INTERPRETED:
        pytest.skip("needs a GPU, or Triton's interpreter")
