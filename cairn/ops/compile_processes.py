"""Processes that compile Triton kernels into Triton's cache on disk.

Triton's front end is Python code, so threads that compile contend for the GIL. A server process
imports the kernels, without CUDA, and forks workers:

    python -P -m cairn.ops.compile_processes WORKERS

It reads pickled kernels from standard input, and writes the index of each kernel that is done to
standard output.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, BinaryIO, NamedTuple

NUMBER = struct.Struct("<Q")
TIMEOUT = 600.0
"""Seconds to wait for a kernel; after that the calling process compiles it."""


class Kernel(NamedTuple):
    """Arguments of `triton.compile`.

    Attributes:
        source: class of the source: ASTSource or GluonASTSource.
        module, name: of the jitted function.
        signature, constants, attrs: the specialization.
        target: the device.
        options: compiler options.
        environment: environment variables that the compiler reads.
    """

    source: type
    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[Any, Any]
    target: Any
    options: dict[str, Any]
    environment: dict[str, Any]

    @staticmethod
    def of(function: Callable[..., Any]) -> Kernel | None:
        """The kernel that a function submitted by Triton 3.6 to an executor compiles; None for
        other functions. Triton has no interface for it, so this reads the function's closure."""
        given = inspect.getclosurevars(function).nonlocals
        if not {"src", "target", "options", "env_vars"} <= given.keys():
            return None
        source, of = given["src"], given["src"].fn
        parts = source.signature, source.constants, source.attrs, given["target"]
        rest = dict(given["options"].__dict__), given["env_vars"]
        return Kernel(type(source), of.__module__, of.__qualname__, *parts, *rest)

    @property
    def is_cached(self) -> bool:
        """Whether Triton's cache contains the kernel."""
        caches = importlib.import_module("triton.runtime.cache")
        backend = importlib.import_module("triton.compiler").make_backend(self.target)
        options = backend.parse_options(self.options)
        key = caches.get_cache_key(self._specialised(), backend, options, self.environment)
        name = f"{self.name[:150]}.json"
        files = caches.get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
        return name in (files or {})

    def compile(self) -> None:
        """Compile the kernel into Triton's cache."""
        compiled = importlib.import_module("triton").compile
        compiled(self._specialised(), target=self.target, options=self.options)

    def _specialised(self) -> Any:
        function = getattr(importlib.import_module(self.module), self.name)
        return self.source(function, self.signature, self.constants, self.attrs)


class Compilers:
    """Client of the compiler processes. If they fail, `compile` returns without compiling.

    Args:
        workers: number of kernels compiled concurrently.
    """

    def __init__(self, workers: int) -> None:
        # Without a visible GPU the server does not initialise CUDA, so it can fork.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Errors are reported when the kernel is launched.
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._waiting: dict[int, Future[None]] = {}
        self._lock, self._closed = threading.Lock(), False
        self._reader = threading.Thread(target=self._read, name="compilers", daemon=True)
        self._reader.start()

    def compile(self, kernel: Kernel) -> None:
        """Compile a kernel; returns when it is in the cache, or after TIMEOUT."""
        done: Future[None] = Future()
        with contextlib.suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            frame = pickle.dumps(kernel)
            with self._lock:
                if self._closed:
                    return
                self._waiting[len(self._waiting)] = done
                assert self._server.stdin is not None
                self._server.stdin.write(NUMBER.pack(len(frame)) + frame)
                self._server.stdin.flush()
            done.result(TIMEOUT)

    def close(self) -> None:
        """Kill the processes."""
        # The server has not been reaped, so its process group id cannot have been reused.
        os.killpg(self._server.pid, signal.SIGKILL)
        self._reader.join()
        self._server.wait()

    def _read(self) -> None:
        """Resolve the futures of kernels that are done; at the end of the stream, all others."""
        assert self._server.stdout is not None
        with contextlib.suppress(OSError):
            while frame := self._server.stdout.read(NUMBER.size):
                self._waiting[NUMBER.unpack(frame)[0]].set_result(None)
        with self._lock:
            self._closed = True
            for done in self._waiting.values():
                if not done.done():
                    done.set_result(None)


def serve(tasks: BinaryIO, answers: BinaryIO, workers: int) -> ProcessPoolExecutor:
    """Submit the kernels read from `tasks` to a process pool until its end. Returns the pool, whose
    workers may still run."""
    lock = threading.Lock()

    def answer(number: int, _: Future[None]) -> None:
        with lock:
            answers.write(NUMBER.pack(number))
            answers.flush()

    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"))
    for number in itertools.count():
        frame = tasks.read(NUMBER.size)
        if not frame:
            break
        kernel: Kernel = pickle.loads(tasks.read(NUMBER.unpack(frame)[0]))
        done = pool.submit(kernel.compile)
        done.add_done_callback(functools.partial(answer, number))
    return pool


if __name__ == "__main__":
    # Forked workers share the imported modules.
    importlib.import_module("cairn.ops")
    # Redirect what the compiler prints to stderr: stdout carries the answers.
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, _answers, int(sys.argv[1]))
    # The client has closed the pipe.
    os.killpg(0, signal.SIGKILL)
