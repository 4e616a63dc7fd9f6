"""The CPU's loops are compiled before the first request waits for them."""

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

LONG = 5.0
"""Seconds of compiling that a user is told about: the first time on a machine."""
HELPER_SECONDS = 600.0
"""What the process that helps may take."""


@functools.cache
def compile_loops(dtype: torch.dtype, helped: bool = True) -> None:
    """Run every loop on a few numbers: what is compiled depends on their dtype alone.

    A process does it once for a dtype, a machine keeps what it compiled. Where nothing is kept yet
    and torch has two threads, another process compiles half of it at the same time.

    Args:
        dtype: of the model.
        helped: whether there may be such a process.
    """
    if not cpu.AVAILABLE:
        return
    began = time.perf_counter()
    mark = cpu.mark_of(loops.attend_tokens, str(dtype).removeprefix("torch."))
    kept = mark is not None and mark.exists()
    sizes = _sizes(dtype)
    # Without a cache folder nothing reaches this process from another one.
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
    level = logging.WARNING if seconds > LONG else logging.INFO
    log.log(level, "compiled the loops for this CPU in %.1f s", seconds)


@contextlib.contextmanager
def _helper(dtype: torch.dtype) -> Iterator[None]:
    """A process that compiles the loops of landmark layers, whose end is waited for. If it fails,
    they are compiled here."""
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
            helper.wait(HELPER_SECONDS)
    finally:
        helper.kill()
        helper.wait()


def compile_landmarks(dtype: torch.dtype) -> None:
    """Of these loops those of landmark layers, half of the work."""
    for size in _sizes(dtype):
        _run_landmarks(dtype, *size)


def _note(mark: Path | None) -> None:
    """Say on disk that everything is kept."""
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()


def _run_rows(dtype: torch.dtype, width: int) -> None:
    """Norms, gates and products, of one token and of several."""
    norm, weight = torch.ones(width, dtype=dtype), torch.ones(2 * width, width, dtype=dtype)
    for tokens in (1, FEW_TOKENS):
        x = torch.ones(tokens, width, dtype=dtype)
        ops.linear(x, weight, None, norm)
        ops.linear(x, weight, None, norm, dtype=torch.float32)
        ops.linear_add(x, torch.ones(tokens, 2 * width, dtype=dtype), weight)
        ops.gated_linear(x, weight, norm)
        ops.rmsnorm(x, norm)


def _run_windows(dtype: torch.dtype, size: int, dim: int) -> None:
    """From projections to attention over windows: one token, then several."""
    k, v, _, table = _pages(dtype, size, dim)
    for tokens in (1, FEW_TOKENS + 1):
        row, slot = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), size)
        given, angles = torch.ones(tokens, 4 * dim, dtype=dtype), torch.ones(tokens, dim)
        q, _ = ops.heads_into_cache(given, None, torch.ones(3, dim), angles, k, v, row, 1)
        ops.window_attention(q, k, v, row, slot, table, 1, dtype=dtype)


def _run_landmarks(dtype: torch.dtype, size: int, dim: int) -> None:
    """Attention over selected pages: one token, then several."""
    k, v, key, table = _pages(dtype, size, dim)
    bias = torch.ones(2, 1)
    for tokens in (1, FEW_TOKENS + 1):
        row, slot = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), size)
        q, z = (torch.ones(tokens, 1, dim, dtype=dtype) for _ in range(2))
        ops.landmark_attention(q, z, k, v, key, bias, row, slot, table, 1, 1, True)
    # Neighbours that share no pages go page by page.
    indices = (torch.arange(tokens) % 2).int().view(tokens, 1, 1)
    ops.page_attention(q, k, v, row, table, indices, torch.ones(tokens, 1, 1))


def _sizes(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Slots of a page and elements of a head; lanes and tiles, of bfloat16, take heads of 64."""
    return ((2, 8), (64, 64)) if dtype == torch.bfloat16 else ((2, 8),)


def _pages(dtype: torch.dtype, size: int, dim: int) -> list[torch.Tensor]:
    """Keys and values of two pages, their summaries, and the table of a row that has both."""
    k, v = (torch.ones(2, 1, size, dim, dtype=dtype) for _ in range(2))
    key = torch.ones(2, 1, dim, dtype=dtype)
    return [k, v, key, torch.tensor([[0, 1]], dtype=torch.int32)]


if __name__ == "__main__":
    compile_landmarks(getattr(torch, sys.argv[1]))
    # What is compiled is on disk; to take LLVM's modules down may last longer than to compile.
    os._exit(0)
