"""The ranks above 0: processes that rank 0 (or another node) starts, sends orders to, and ends.

Orders are written to the standard input of each. When rank 0 ends in any way, the input ends and
the process exits, so none is left behind.
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

import msgspec
import torch

from cairn.config import EngineOptions
from cairn.distributed.groups import Group
from cairn.distributed.rendezvous import LOOPBACK, START, dist, group_of, hold_store
from cairn.engine.nodes import Link, Meeting
from cairn.errors import BadConfig, EngineDead
from cairn.ops.allreduce.peers import PeerSums
from cairn.runner.orders import FRAME, OrderWriter
from cairn.specs.nodes import Nodes

WATCHED_EVERY = 0.2
"""Seconds between checks of the processes."""
GRACE = 5.0
"""Seconds within which they must end."""
CHECKS = "CAIRN_CHECK_RANKS"
"""Environment variable; 1: steps outside of CUDA graphs compare hidden states between the ranks."""
ERROR, PHASE = "error", "phase"
"""Prefixes of store keys, followed by a rank: why it ended, and which phase it has completed."""


class Seat(msgspec.Struct, frozen=True):
    """The place of a rank in its group.

    Attributes:
        rank, ranks: its index, and the number of ranks.
        local, here: its index on its host, and the number of ranks there.
        address: address of its host for other ranks.
        checks: whether ranks compare values that must be equal on all of them, see
            `Group.expect_equal`.
    """

    rank: int
    ranks: int
    local: int
    here: int
    address: str = LOOPBACK
    checks: bool = False

    def group(self, store: Any, device: torch.device) -> Group:
        """The group of all ranks; see `group_of`."""
        here = self.local, self.here
        group = group_of(store, self.rank, self.ranks, device, self.address, here)
        group.checks = self.checks
        if device.type == "cuda" and self.here == self.ranks:
            shared = dist.PrefixStore("sums", store)
            peers = PeerSums.of(shared, group.backend, self.rank, self.ranks, device)
            # Either all ranks use it or none does.
            if group.least(int(peers is not None), device):
                group.peers = peers
        return group


class RankProcess:
    """The process of a rank on this host.

    Args:
        seat: of the rank.
        host, port: of rank 0's store.
        device: "cpu", or the first GPU of the ranks on this host.

    Raises:
        BadConfig: it cannot be started.
    """

    def __init__(self, seat: Seat, host: str, port: int, device: torch.device) -> None:
        self.rank = seat.rank
        self._device = device_of(device, seat.local)
        # The ranks share the machine's threads.
        threads = os.environ.get("OMP_NUM_THREADS", str(threads_of_rank(seat.here)))
        arguments = [host, str(port), str(self._device), msgspec.json.encode(seat).decode()]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cairn.engine.rank", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": threads},
                start_new_session=True,
            )
        except OSError as error:
            raise BadConfig(
                f"the process of rank {seat.rank} cannot be started: {error}",
                "Check the limits of processes",
            ) from error

    def send(self, frame: bytes) -> None:
        """Send an order. Raises OSError if the process is gone."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(frame)
            stdin.flush()
        except ValueError as error:
            raise BrokenPipeError(str(error)) from None

    def death(self, store: Any) -> EngineDead | None:
        """Why it ended, if possible as it reported in the store; None: it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if store is not None and store.check([f"{ERROR}/{self.rank}"]):
            told = store.get(f"{ERROR}/{self.rank}").decode()
            return EngineDead(f"rank {self.rank} ({self._device}): {told}")
        name = f"the process of rank {self.rank} ({self._device})"
        if code >= 0:
            return EngineDead(f"{name} ended with exit code {code}", "Look at its last log lines")
        hint = "Start the engine again"
        if -code == signal.SIGKILL:
            hint = (
                "If the machine ran out of memory (dmesg tells), lower kv_cache_memory "
                "(--kv-cache-memory)"
            )
        return EngineDead(f"{name} was killed by {signal.Signals(-code).name}", hint)


class Ranks:
    """The ranks above 0: processes on this host, and those of other nodes. The constructor returns
    when all have started.

    Args:
        size: of the group, including this process.
        device: device of rank 0.
        on_death: called once, from a thread, when a rank is gone.
        nodes: of which this one is number 0; None: all ranks are here.
        listener: see `Meeting`.

    Attributes:
        group: this process among them.

    Raises:
        BadConfig: no process can be started, or the port at which nodes meet is taken.
        EngineDead: a rank ended, or did not start in time.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        on_death: Callable[[EngineDead], object] = lambda error: None,
        nodes: Nodes | None = None,
        listener: int | None = None,
    ) -> None:
        self.size = size
        self.orders = OrderWriter()
        meeting = None if nodes is None else Meeting(nodes, listener)
        host = LOOPBACK if nodes is None else nodes.host
        self._store, self._on_death = hold_store(host), on_death
        self._ended, self._failing = threading.Event(), threading.Lock()
        self._reason: EngineDead | None = None
        self._nodes = 1 if nodes is None else nodes.count
        self._store.set(f"{PHASE}/0", "start")
        here = size // self._nodes
        local = nodes.local if nodes is not None and nodes.launched else (0, here)
        # Ranks of other nodes are excluded.
        checks = nodes is None and os.environ.get(CHECKS) == "1"
        seats = [Seat(rank, size, local[0] + rank, local[1], host, checks) for rank in range(here)]
        self._local = [self._spawn(seat, host, device) for seat in seats[1:]]
        self._links: list[Link] = []
        # Ends the processes even if `close` is not called.
        self._end = weakref.finalize(self, _end, self._local, self._links)
        try:
            if meeting is not None:
                self._links += meeting.accept(self._store.port, size, device.type, self._reported)
            self._await_all(START.total_seconds() if nodes is None else nodes.seconds)
            with self.explained():
                self.group: Group = seats[0].group(self._store, device)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def load(self, model: Path, options: EngineOptions) -> None:
        """Let the ranks load their shares of a model."""
        self.orders = OrderWriter()
        self.send(self.orders.load(str(model.absolute()), options))

    def send(self, order: bytes) -> None:
        """Send an order to all ranks. Raises EngineDead if one is gone."""
        frame = FRAME.pack(len(order)) + order
        told: list[RankProcess | Link] = [*self._local, *self._links]
        for each in told:
            try:
                each.send(frame)
            except OSError:
                raise self.reason() or EngineDead("the ranks have been ended") from None

    def reason(self) -> EngineDead | None:
        """Why a rank is gone; None: all run, or were ended by `close`."""
        if self._ended.is_set():
            return self._reason
        deadline = time.monotonic() + 1.0
        # A connection breaks a moment before the process is gone.
        while time.monotonic() < deadline:
            if (found := self._gone()) is not None:
                return found
            time.sleep(0.01)
        return None

    def _gone(self) -> EngineDead | None:
        """Why a rank is gone; None: all run."""
        deaths = (process.death(self._store) for process in self._local)
        # The error that a rank reported itself is more informative than the end of its process.
        said = (self._said(link) or link.reason for link in self._links if link.reason)
        return next(filter(None, (*deaths, *said)), None)

    def _said(self, link: Link) -> EngineDead | None:
        here = self.size // self._nodes
        for rank in range(link.node * here, (link.node + 1) * here):
            if self._store.check([f"{ERROR}/{rank}"]):
                told = self._store.get(f"{ERROR}/{rank}").decode()
                return EngineDead(f"rank {rank} (node {link.node}): {told}")
        return None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Context manager: an exception caused by the end of a rank's process is replaced by
        EngineDead with the reason."""
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

    def _spawn(self, seat: Seat, host: str, device: torch.device) -> RankProcess:
        return RankProcess(seat, host, self._store.port, device)

    def _await_all(self, seconds: float) -> None:
        """Wait until every rank has registered in the store."""
        deadline = time.monotonic() + seconds
        absent = list(range(1, self.size))
        while absent:
            absent = [rank for rank in absent if not self._store.check([f"{PHASE}/{rank}"])]
            if (gone := self._gone()) is not None:
                raise gone
            if absent and time.monotonic() > deadline:
                verb = "has" if len(absent) == 1 else "have"
                raise EngineDead(
                    f"{self._named(absent)} {verb} not reported in {seconds:.0f} s; the others: "
                    f"{self._reported()}",
                    "Look at the last log lines of those that are missing",
                )
            time.sleep(0.02)

    def _named(self, ranks: Sequence[int]) -> str:
        here = self.size // self._nodes
        named = [f"{r} (node {r // here})" if self._nodes > 1 else f"{r}" for r in ranks]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(named)}"

    def _reported(self) -> str:
        """The ranks that have reported, by the last phase that they completed."""
        phases: dict[str, list[int]] = {}
        for rank in range(self.size):
            if self._store.check([f"{PHASE}/{rank}"]):
                phase = self._store.get(f"{PHASE}/{rank}").decode()
                phases.setdefault(phase, []).append(rank)
        return ", ".join(f"{self._named(ranks)} at {phase}" for phase, ranks in phases.items())

    def _watch(self) -> None:
        """Thread that reports when a rank is gone: the main thread may wait for ever in a
        collective."""
        while not self._ended.wait(WATCHED_EVERY):
            if (gone := self._gone()) is not None:
                self.fail(gone)
                return


def device_of(first: torch.device, local: int) -> torch.device:
    """The device of a rank: GPUs of a host are taken in order.

    Args:
        first: device of the host's first rank.
        local: the rank's index on its host.
    """
    if first.type == "cpu":
        return first
    return torch.device(first.type, (first.index or 0) + local)


def threads_of_rank(size: int) -> int:
    """Threads per rank when several ranks run on the CPU."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def _end(local: Sequence[RankProcess], links: Sequence[Link]) -> None:
    for link in links:
        link.close()
    end_processes([each.process for each in local])


def end_processes(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Close the processes' inputs, which makes them exit, and wait."""
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
