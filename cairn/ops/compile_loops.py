"""Compilation of the Numba loops for the CPU, before the first request needs them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from cairn import ops
from cairn.ops import cpu
from cairn.ops.attention.tiles import FEW_TOKENS
from cairn.ops.cpu import avx512
from cairn.ops.landmark import loops

log = logging.getLogger(__name__)

WARN_SECONDS = 5.0
"""Compilations that take longer are logged as a warning."""
HELPER_TIMEOUT = 600.0
"""Seconds to wait for the helper process."""


@functools.cache
def compile_loops(dtype: torch.dtype, helped: bool = True) -> None:
    """Compile every loop by running it on small tensors; the code depends only on their dtype.

    This is done once per process and dtype; Numba caches the code on disk. If the cache has
    nothing yet and torch has at least two threads, a helper process compiles half of the loops.

    Args:
        dtype: of the model.
        helped: whether a helper process may be started.
    """
    if not cpu.AVAILABLE:
        return
    began = time.perf_counter()
    mark = cpu.mark_of(loops.attend_tokens, str(dtype).removeprefix("torch."))
    kept = mark is not None and mark.exists()
    sizes = _sizes(dtype)
    # Without a cache folder this process cannot load what the helper compiled.
    with _helper(dtype) if helped and not kept and mark is not None else contextlib.nullcontext():
        for width in (8, 2 * avx512.LANES):
            _run_rows(dtype, width)
        for size in sizes:
            _run_windows(dtype, *size)
    compile_landmarks(dtype)
    seconds = time.perf_counter() - began
    if kept:
        log.info("loaded the compiled loops in %.1f s", seconds)
        return
    _note(mark)
    level = logging.WARNING if seconds > WARN_SECONDS else logging.INFO
    log.log(level, "compiled the loops for this CPU in %.1f s", seconds)


@contextlib.contextmanager
def _helper(dtype: torch.dtype) -> Iterator[None]:
    """Run a process that compiles the loops of landmark layers during the block, and wait for its
    end. If it fails, this process compiles them later."""
    if torch.get_num_threads() < 2:
        yield
        return
    log.warning("compiling loops for this CPU: this takes up to a minute, once on a machine")
    command = [sys.executable, "-m", "cairn.ops.compile_loops", str(dtype).removeprefix("torch.")]
    null = subprocess.DEVNULL
    helper = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(HELPER_TIMEOUT)
    finally:
        helper.kill()
        helper.wait()


def compile_landmarks(dtype: torch.dtype) -> None:
    """Compile the loops of landmark layers, which take half of the time."""
    for size in _sizes(dtype):
        _run_landmarks(dtype, *size)


def _note(mark: Path | None) -> None:
    """Create the file that says that all loops are cached."""
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()


def _run_rows(dtype: torch.dtype, width: int) -> None:
    """Norms, gates and matrix products, for one token and for several."""
    norm, weight = torch.ones(width, dtype=dtype), torch.ones(2 * width, width, dtype=dtype)
    for tokens in (1, FEW_TOKENS):
        x = torch.ones(tokens, width, dtype=dtype)
        ops.linear(x, weight, None, norm)
        ops.linear(x, weight, None, norm, dtype=torch.float32)
        ops.linear_add(x, torch.ones(tokens, 2 * width, dtype=dtype), weight)
        ops.gated_linear(x, weight, norm)
        ops.rmsnorm(x, norm)


def _run_windows(dtype: torch.dtype, size: int, dim: int) -> None:
    """Rotary embedding, cache writes and window attention, for one token and for several."""
    k, v, _, table = _pages(dtype, size, dim)
    for tokens in (1, FEW_TOKENS + 1):
        row, slot = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), size)
        given, angles = torch.ones(tokens, 4 * dim, dtype=dtype), torch.ones(tokens, dim)
        q, _ = ops.heads_into_cache(given, None, torch.ones(3, dim), angles, k, v, row, 1)
        ops.window_attention(q, k, v, row, slot, table, 1, dtype=dtype)


def _run_landmarks(dtype: torch.dtype, size: int, dim: int) -> None:
    """Attention over selected pages, for one token and for several."""
    k, v, key, table = _pages(dtype, size, dim)
    bias = torch.ones(2, 1)
    for tokens in (1, FEW_TOKENS + 1):
        row, slot = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), size)
        q, z = (torch.ones(tokens, 1, dim, dtype=dtype) for _ in range(2))
        ops.landmark_attention(q, z, k, v, key, bias, row, slot, table, 1, 1, True)
    # Adjacent tokens without common pages run the loop over pages.
    indices = (torch.arange(tokens) % 2).int().view(tokens, 1, 1)
    ops.page_attention(q, k, v, row, table, indices, torch.ones(tokens, 1, 1))


def _sizes(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Pairs of page size and head dim. The vector and tile loops, for bfloat16, need heads of
    64."""
    return ((2, 8), (64, 64)) if dtype == torch.bfloat16 else ((2, 8),)


def _pages(dtype: torch.dtype, size: int, dim: int) -> list[torch.Tensor]:
    """Key and value cache of two pages, their summary keys, and the page table of one row."""
    k, v = (torch.ones(2, 1, size, dim, dtype=dtype) for _ in range(2))
    key = torch.ones(2, 1, dim, dtype=dtype)
    return [k, v, key, torch.tensor([[0, 1]], dtype=torch.int32)]


if __name__ == "__main__":
    compile_landmarks(getattr(torch, sys.argv[1]))
    # The code is on disk. Skip the destructors: those of LLVM may take longer than compiling.
    os._exit(0)
