"""Kernels are compiled in parallel before their first launch.

Triton compiles a kernel when it is first launched, in the thread that launches it: what runs a
hundred kernels for the first time waits for one after the other, and then for a C compiler that
builds each launcher. Here the work is run once without launching anything, and the kernels that it
would have launched are compiled meanwhile, on all cores: by processes, then loaded by threads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.compile_processes import Compilers, Kernel

log = logging.getLogger(__name__)

MAX_WORKERS = 32
"""Kernels that are compiled at the same time."""
FEWEST_PROCESSES = 4
"""With fewer workers threads compile: a process of its own needs seconds to import the kernels."""


class _Workers(ThreadPoolExecutor):
    """Threads that have kernels compiled, and load them.

    Args:
        count: how many; FEWEST_PROCESSES or more have as many processes compile for them.
    """

    def __init__(self, count: int) -> None:
        # CUDA's current device is per thread and is device 0 in a new one.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        begin = None if device is None else functools.partial(torch.cuda.set_device, device)
        super().__init__(count, initializer=begin)
        self._count, self._lock = count, threading.Lock()
        self._compilers: Compilers | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As an executor's; the function gives a compiled kernel."""

        def run() -> Any:
            kernel = Kernel.of(function) if self._count >= FEWEST_PROCESSES else None
            if kernel is not None and not kernel.is_kept:
                self._processes().compile(kernel)
            return gpu.loaded(function(*args, **kwargs))

        return super().submit(run)

    def _processes(self) -> Compilers:
        """Started when the first kernel is not on disk."""
        with self._lock:
            self._compilers = self._compilers or Compilers(self._count)
            return self._compilers

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As an executor's; the processes end."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._compilers is not None:
            self._compilers.close()


class _Compiler:
    """Observer under which nothing is launched."""

    launches = False

    def took(self, tensor: Tensor, take: Callable[[], Tensor], blank: bool) -> None:
        """Zero uninitialised memory, so that indices in it are in range."""
        if blank:
            tensor.zero_()

    def spoiled(self) -> None:
        """Nothing to do: other work runs as always."""

    def launched(self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any]) -> None:
        """Take the result if it is compiled by now: later look-ups are faster."""
        if hasattr(compiled, "future") and compiled.future.done():
            compiled.result(ignore_errors=True)


def compile_ahead(
    work: Callable[[], object], workers: int | None = None, note: Path | None = None
) -> None:
    """Compile the Triton kernels that some work launches, if it has not been done; on return they
    are there.

    The work is run, but no kernel of this thread's is launched: memory from `gpu.empty` is all 0
    instead. What it computes means nothing, and it must not write where that matters.

    Nothing is done with one core, with a Triton that cannot, or if an observer is set already
    (`gpu.watch`). A kernel that does not compile raises its error when it is launched.

    Args:
        work: called once, with no arguments.
        workers: kernels at a time; None: one for each core of this process.
        note: a file that says that all kernels are on disk (`note_of`). Where it exists nothing is
            done: they are loaded when they are launched. It is written at the end.
    """
    if note is not None and note.exists():
        return
    workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS) if workers is None else workers
    mode = gpu.async_compile_mode()
    if mode is None or workers < 2 or gpu.watch.observer is not None:
        return
    began = time.perf_counter()
    with _Workers(workers) as executor, mode(executor, ignore_errors=True) as running:
        gpu.watch.observer = _Compiler()
        try:
            work()
        finally:
            gpu.watch.observer = None
        count, found = len(running.raw_futures), time.perf_counter() - began
    seconds = time.perf_counter() - began
    log.info("%d kernels were found in %.1f s, and are ready after %.1f s", count, found, seconds)
    if note is not None:
        with contextlib.suppress(OSError):
            note.touch()
