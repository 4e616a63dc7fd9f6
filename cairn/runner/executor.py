"""The interface between scheduler and runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

from cairn.cache.host import Move
from cairn.errors import EngineDead
from cairn.runner.device_records import DeviceRecords
from cairn.runner.host_records import HostRecords
from cairn.runner.orders import CALLS, Call, Moves, OrderWriter, Step
from cairn.runner.runner import Runner
from cairn.runner.step import NO_MASKS, Launched, Masks, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in order."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; the next one may be launched before its result is read."""

    def move(self, moves: Sequence[Move], into_host: bool) -> Sequence[Move]:
        """Move records between device and host memory: see `cairn.cache.host.Mover`."""

    def call(self, name: str, **arguments: Any) -> Any:
        """Call one of the methods `cairn.runner.orders.CALLS` on all ranks."""

    def shutdown(self) -> None:
        """Release what the executor holds."""


class PassingExecutor:
    """Forwards everything to another executor; base of executors that add something.

    Args:
        inner: the other executor.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor`."""
        return self._inner.launch(plan)

    def move(self, moves: Sequence[Move], into_host: bool) -> Sequence[Move]:
        """See `Executor`."""
        return self._inner.move(moves, into_host)

    def call(self, name: str, **arguments: Any) -> Any:
        """See `Executor`."""
        return self._inner.call(name, **arguments)

    def shutdown(self) -> None:
        """See `Executor`."""
        self._inner.shutdown()


class InProcessExecutor:
    """Runs plans on a Runner of this process.

    Args:
        runner: the model with its pages.
        records: records beside the pools; None: no host cache and no transfers.
    """

    def __init__(self, runner: Runner, records: HostRecords | DeviceRecords | None = None) -> None:
        self.runner = runner
        self.records = records

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step: on a GPU it is only queued, on the CPU it has run on return."""
        return self.runner.launch(plan)

    def move(self, moves: Sequence[Move], into_host: bool) -> Sequence[Move]:
        """Move records; on a GPU after all work queued before."""
        assert self.records is not None, "an executor without host memory moves no records"
        return self.records.move(moves, into_host)

    def call(self, name: str, **arguments: Any) -> Any:
        """See `Executor`."""
        assert name in CALLS
        return attrgetter(name)(self.runner)(**arguments)

    def shutdown(self) -> None:
        """Nothing to release: the runner goes with its last reference."""


class Peers(Protocol):
    """Rank 0's view of the other ranks.

    Attributes:
        orders: encodes the orders sent to them.
    """

    orders: OrderWriter

    def send(self, order: bytes) -> None:
        """Send an order to all of them. Raises EngineDead if one is gone."""

    def reason(self) -> EngineDead | None:
        """Why one of them is gone; None: all run."""

    def fail(self, reason: EngineDead) -> None:
        """End them; `reason` then says why."""

    def close(self) -> None:
        """End them."""


class RanksExecutor:
    """Sends plans to the other ranks, and runs them on the Runner of this process.

    A failure on any rank leaves the ranks in different states, so all of them are ended.
    """

    def __init__(self, local: InProcessExecutor, peers: Peers) -> None:
        self._local, self._peers = local, peers
        self._orders = peers.orders

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor`. Raises EngineDead if a rank is gone."""
        self._peers.send(self._orders.step(plan))
        with self.watched():
            return _Watched(self._local.launch(plan), self)

    def move(self, moves: Sequence[Move], into_host: bool) -> Sequence[Move]:
        """See `Executor`. Raises EngineDead if a rank is gone."""
        self._peers.send(self._orders.move(moves, into_host))
        with self.watched():
            return self._local.move(moves, into_host)

    def call(self, name: str, **arguments: Any) -> Any:
        """See `Executor`. Raises EngineDead if a rank is gone."""
        self._peers.send(self._orders.call(name, arguments))
        with self.watched():
            return self._local.call(name, **arguments)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: if the block raises, end the other ranks, and raise the reason why one
        of them was gone before, or the error itself."""
        try:
            yield
        except Exception as error:
            gone = self._peers.reason()
            self._peers.fail(gone or EngineDead(f"a step failed on rank 0: {error}"))
            if gone is None:
                raise
            raise gone from error

    def shutdown(self) -> None:
        """End the other ranks."""
        self._peers.close()


class _Watched:
    """A launched step whose failure ends the ranks."""

    def __init__(self, launched: Launched, executor: RanksExecutor) -> None:
        self._launched, self._executor = launched, executor

    def choose(self, masks: Masks) -> None:
        """See `Launched`."""
        with self._executor.watched():
            self._launched.choose(masks)

    def result(self) -> StepResult:
        """See `Launched`."""
        return self._launched.result()


class Follower:
    """Executes rank 0's orders on another rank."""

    def __init__(self, local: InProcessExecutor) -> None:
        self._local = local

    def follow(self, order: Step | Moves | Call) -> None:
        """Run the next order."""
        if isinstance(order, Moves):
            self._local.move(order.moves, order.into_host)
            return
        if isinstance(order, Call):
            self._local.call(order.name, **order.arguments)
            return
        launched = self._local.launch(order.plan)
        if order.plan.constrained:
            # Rank 0 samples under its masks; this rank receives the tokens.
            launched.choose(NO_MASKS)
