"""Kernels compiled by other processes."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.ops import gpu, rmsnorm
from cairn.ops.compile_ahead import compile_ahead
from cairn.ops.compile_processes import NUMBER, Compilers, Kernel, serve


class Task:
    """A fake kernel whose compilation creates a file or fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def compile(self) -> None:
        self.path.write_text("compiled")


def test_every_task_is_answered_also_one_that_fails(tmp_path: Path) -> None:
    tasks = [Task(tmp_path / "a"), Task(tmp_path / "none" / "b"), Task(tmp_path / "c")]
    frames = [pickle.dumps(task) for task in tasks]
    given = b"".join(NUMBER.pack(len(frame)) + frame for frame in frames)
    answers = io.BytesIO()
    serve(io.BytesIO(given), answers, 1).shutdown()
    done = [NUMBER.unpack(answers.getvalue()[i : i + 8])[0] for i in range(0, 24, 8)]
    assert sorted(done) == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_without_a_server_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    compilers = Compilers(2)
    kernel = Kernel(object, "math", "sin", {}, {}, {}, None, {}, {})
    compilers.compile(kernel)
    compilers.compile(kernel)
    compilers.close()


def test_other_functions_are_not_sent_to_compilers() -> None:
    assert Kernel.of(lambda: None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_found_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if gpu.async_compile_mode() is None:
        pytest.skip("needs Triton 3.6")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    knobs = pytest.importorskip("triton").knobs
    hits: list[bool] = []

    def listen(cache_hit: bool, **told: Any) -> None:
        hits.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    # A width that no other test has, so that this process has not compiled for it.
    x, weight = torch.ones(4, 1328, device="cuda"), torch.ones(1328, device="cuda")
    marker = tmp_path / "marker"
    compile_ahead(lambda: rmsnorm.using("triton")(x, weight, 1e-6), workers=4, marker=marker)
    assert hits
    assert all(hits)
    assert marker.exists()
    torch.testing.assert_close(rmsnorm.using("triton")(x, weight, 0.0), x)
    compile_ahead(lambda: pytest.fail("has been called"), workers=4, marker=marker)
