"""The ranks above 0 on this host: processes that rank 0 starts, tells what to run, and ends.

Orders go through the standard input of each. Its end is the end of rank 0, however that came about,
and the process with it: none is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cairn.config import EngineOptions
from cairn.distributed.groups import Group
from cairn.distributed.rendezvous import LOOPBACK, START, group_of, hold_store
from cairn.errors import BadConfig, EngineDead
from cairn.runner.orders import FRAME, OrderWriter

WATCHED_EVERY = 0.2
"""Seconds between two looks at the processes."""
GRACE = 5.0
"""Seconds that they have to end."""
ERROR, PHASE = "error", "phase"
"""Keys of the store, each with a rank behind it: why it ended, and what it has done."""


class Ranks:
    """Processes of ranks 1, 2, ...; returns when all have come.

    Args:
        size: of the group, this process included.
        device: of rank 0.
        on_death: called by a thread of this object when one of the processes is gone, once.

    Attributes:
        group: this process among them.

    Raises:
        BadConfig: no process can be started.
        EngineDead: one has ended, or has not come in time.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        on_death: Callable[[EngineDead], object] = lambda error: None,
    ) -> None:
        self.size = size
        self.orders = OrderWriter()
        self._store, self._on_death = hold_store(), on_death
        self._ended, self._failing = threading.Event(), threading.Lock()
        self._reason: EngineDead | None = None
        self._processes = [self._spawn(rank, device) for rank in range(1, size)]
        # Also where nobody calls `close`.
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            self._await_all()
            with self.explained():
                self.group: Group = group_of(self._store, 0, size, device)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def load(self, model: Path, options: EngineOptions) -> None:
        """Have them load their shares of a model."""
        self.orders = OrderWriter()
        self.send(self.orders.load(str(model.absolute()), options))

    def send(self, order: bytes) -> None:
        """Tell all of them. Raises EngineDead if one is gone."""
        frame = FRAME.pack(len(order)) + order
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(frame)
                process.stdin.flush()
            except (OSError, ValueError):
                raise self.reason() or EngineDead("the ranks have been ended") from None

    def reason(self) -> EngineDead | None:
        """Why one of them is gone; None: all are there, or have been ended."""
        if self._ended.is_set():
            return self._reason
        deadline = time.monotonic() + 1.0
        # A connection breaks a moment before the process is gone.
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    return self._death(rank, process.returncode)
            time.sleep(0.01)
        return None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within, an exception that follows from the end of a process is told as that."""
        try:
            yield
        except RuntimeError as error:
            reason = self.reason()
            self.close()
            if reason is None or isinstance(error, EngineDead):
                raise
            raise reason from error
        except BaseException:
            self.close()
            raise

    def fail(self, reason: EngineDead) -> None:
        """End them and report `reason` to the engine; later calls do nothing."""
        with self._failing:
            if self._ended.is_set():
                return
            self._reason = reason
            self._ended.set()
            self._on_death(reason)
        self._end()

    def close(self) -> None:
        """End them, and wait for it."""
        self._ended.set()
        self._end()

    def _spawn(self, rank: int, device: torch.device) -> subprocess.Popen[bytes]:
        arguments = [LOOPBACK, self._store.port, rank, self.size, device.type]
        # Threads of all ranks together are those of the machine.
        threads = os.environ.get("OMP_NUM_THREADS", str(threads_of_rank(self.size)))
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "cairn.engine.rank", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": threads},
                start_new_session=True,
            )
        except OSError as error:
            raise BadConfig(
                f"the process of rank {rank} cannot be started: {error}",
                "Check the limits of processes",
            ) from error

    def _await_all(self) -> None:
        """Wait until every rank has come to the store."""
        deadline = time.monotonic() + START.total_seconds()
        absent = set(range(1, self.size))
        while absent:
            absent = {rank for rank in absent if not self._store.check([f"{PHASE}/{rank}"])}
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise self._death(rank, process.returncode)
            if absent and time.monotonic() > deadline:
                raise EngineDead(
                    f"ranks {sorted(absent)} have not come in {START.total_seconds():.0f} s",
                    "Look at their last log lines",
                )
            time.sleep(0.02)

    def _death(self, rank: int, code: int) -> EngineDead:
        """How a process ended."""
        if self._store.check([f"{ERROR}/{rank}"]):
            return EngineDead(f"rank {rank}: {self._store.get(f'{ERROR}/{rank}').decode()}")
        if code >= 0:
            return EngineDead(
                f"the process of rank {rank} ended with exit code {code}",
                "Look at its last log lines",
            )
        hint = "Start the engine again"
        if -code == signal.SIGKILL:
            hint = (
                "If the machine ran out of memory (dmesg tells), lower kv_cache_memory "
                "(--kv-cache-memory)"
            )
        name = signal.Signals(-code).name
        return EngineDead(f"the process of rank {rank} was killed by {name}", hint)

    def _watch(self) -> None:
        """Say when one is gone: in a collective with it, the main thread may wait for ever."""
        while not self._ended.wait(WATCHED_EVERY):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    self.fail(self._death(rank, process.returncode))
                    return


def threads_of_rank(size: int) -> int:
    """Threads that one of several ranks on the CPU may use."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Close their inputs, which they end with, and wait."""
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
