"""Parallel compilation of kernels before their first launch.

Triton compiles a kernel at its first launch, in the launching thread: the kernels of a step are
compiled one after the other, and a C compiler builds each launcher. `compile_ahead` runs the work
once without launching kernels. Meanwhile processes compile the kernels that it would have launched,
on all cores, and threads load them.
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
"""Most kernels that are compiled concurrently."""
MIN_PROCESSES = 4
"""With fewer workers, threads compile: a process needs seconds to import the kernels."""


class _Workers(ThreadPoolExecutor):
    """Threads that compile kernels and load them.

    Args:
        count: number of threads; if it is MIN_PROCESSES or more, as many processes compile.
    """

    def __init__(self, count: int) -> None:
        # CUDA's current device is per thread and is device 0 in a new one.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        begin = None if device is None else functools.partial(torch.cuda.set_device, device)
        super().__init__(count, initializer=begin)
        self._count, self._lock = count, threading.Lock()
        self._compilers: Compilers | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As Executor.submit; the function returns a compiled kernel."""

        def run() -> Any:
            kernel = Kernel.of(function) if self._count >= MIN_PROCESSES else None
            if kernel is not None and not kernel.is_cached:
                self._processes().compile(kernel)
            return gpu.load(function(*args, **kwargs))

        return super().submit(run)

    def _processes(self) -> Compilers:
        """The processes, which start when a kernel is not in Triton's cache."""
        with self._lock:
            self._compilers = self._compilers or Compilers(self._count)
            return self._compilers

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As Executor.shutdown; also ends the processes."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._compilers is not None:
            self._compilers.close()


class _Compiler:
    """Observer under which kernels are compiled but not launched."""

    launches = False

    def allocated(self, tensor: Tensor, allocate: Callable[[], Tensor], blank: bool) -> None:
        """Zero uninitialised memory, so that indices read from it are in range."""
        if blank:
            tensor.zero_()

    def not_replayable(self) -> None:
        """Other work runs as usual."""

    def launched(self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any]) -> None:
        """Replace the future by its result if it is done, which makes later look-ups faster."""
        if hasattr(compiled, "future") and compiled.future.done():
            compiled.result(ignore_errors=True)


def compile_ahead(
    work: Callable[[], object], workers: int | None = None, marker: Path | None = None
) -> None:
    """Compile the Triton kernels that `work` launches and that are not in the cache; return when
    they are loaded.

    `work` is called, but this thread launches no kernels, and memory from `gpu.empty` is zeroed.
    Its results are meaningless, so it must not write to memory whose content matters.

    Does nothing with one core, with a Triton without AsyncCompileMode, or if an observer is set
    (`gpu.watch`). A kernel that does not compile raises its error when it is launched.

    Args:
        work: called once, without arguments.
        workers: number of kernels compiled concurrently; None: one per core of this process.
        marker: an empty file (`cache_path`) whose existence means that all kernels are in Triton's
            cache, so nothing is compiled. It is written at the end.
    """
    if marker is not None and marker.exists():
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
    if marker is not None:
        with contextlib.suppress(OSError):
            marker.touch()
