"""Records an op's kernel launches and replays them with new tensor addresses.

A layer of an eager step launches a dozen kernels, and the next layer launches the same ones: same
shapes, strides and numbers, other addresses. Preparing them again (checks, choice of the
implementation, arithmetic on shapes, Triton's inspection of every argument) takes the host longer
than the device computes. So a call of an implementation with `replayed=True` (registry.py) is
recorded: the allocations it made through `gpu` and `grid_barrier`, the kernels it launched, and the
tensor that each pointer argument belongs to. Later calls with the same signature launch the
compiled kernels again (`gpu.relaunch`) with new addresses. plans.py decides which calls are
recorded.

Results are the same because the signature holds everything that such an implementation depends on:
every tensor's shape, strides, dtype, device and alignment to 16 bytes, which tensors start at the
same address, and the type and value of every other argument. An implementation with `replayed=True`
only allocates memory and launches kernels, and never reads tensor values on the host. A signature
is never replayed if one of its pointers belongs neither to an argument nor to memory from `gpu`, or
if the call runs an op whose implementation is not replayed. Streams, graph capture and PDL work as
in a plain call. While launch hooks are set, as by profilers, or another device is current, all
calls are plain. A plan owns no memory: it makes each large allocation before the first kernel that
uses it and frees it after the last, with the sizes of a plain call. Small ones share one allocation
per call.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cairn.ops import gpu

SHARED_BYTES = 1 << 20
"""Temporary memory of a call up to this many bytes is one allocation, because an allocation takes
the host nearly as long as a launch."""
_LOW_BITS = 15
_APART = 512
"""Alignment in bytes of the parts of that allocation, as in torch's allocator."""
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""Tensor types without __torch_function__."""


class Call(NamedTuple):
    """One call of an op.

    Attributes:
        signature: all that a plan for the call depends on.
        tensors: those among the arguments, in order.
        addresses: their data pointers.
        device: index of their CUDA device; -1: host tensors.
    """

    signature: tuple[Any, ...]
    tensors: list[Tensor]
    addresses: list[int]
    device: int


def call_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The call of an op; None if it can never be replayed."""
    key: list[Any] = []
    tensors: list[Tensor] = []
    home: int | None = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            tensors.append(value)
            device = value.get_device()
            if device != home:
                # A host tensor beside device tensors is not supported: the key does not say
                # whether it is pinned.
                if home is not None:
                    return None
                home = device
            key += (value.shape, value.stride(), value.dtype, device)
        elif kind is list and all(type(x) is int for x in value):
            key += (kind, tuple(value))
        elif isinstance(value, Tensor) or kind.__hash__ is None:
            return None
        else:
            # 0.0 == -0.0, so zeros are keyed by their repr.
            key += (kind, value if value or kind is not float else str(value))
    addresses = list(map(Tensor.data_ptr, tensors))
    if functools.reduce(operator.or_, addresses) & _LOW_BITS:
        key.append(("behind", *(address & _LOW_BITS for address in addresses)))
    if len(set(addresses)) < len(addresses):
        key.append(("same", *map(addresses.index, addresses)))
    key += kwargs
    return Call(tuple(key), tensors, addresses, -1 if home is None else home)


@dataclass(slots=True)
class _Piece:
    """An allocation made during a call.

    Attributes:
        allocate: function that allocates it.
        blank: whether it is uninitialised.
        shape, dtype: of the tensor, which is contiguous.
        start: its address.
        slot: index of its address among the slots; -1: no kernel uses it.
        last: index of the last step that uses it.
    """

    allocate: Callable[[], Tensor]
    blank: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    slot: int = -1
    last: int = -1

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Place:
    """An address with the `data_ptr` method that Triton calls on tensors."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@dataclass(slots=True)
class _Table:
    """A tensor descriptor (TMA) without its base address.

    Attributes:
        slot: of the descriptor; start: slot of its base address.
        kind, rest: its class, and its attributes other than `base`.
    """

    slot: int
    start: int
    kind: type
    rest: dict[str, Any]

    def at(self, address: int) -> Any:
        """The descriptor of the same shape at another address."""
        table: Any = object.__new__(self.kind)
        table.__dict__.update(self.rest, base=_Place(address))
        return table


@dataclass(slots=True)
class _Step:
    """A kernel launch. Slots hold the addresses and scalars of a call.

    Attributes:
        run: the launch function.
        pieces: indices of the allocations made before it.
        views: addresses inside other tensors: (slot, slot of the other, offset in bytes).
        tables: tensor descriptors among its arguments.
        pick: selects its arguments from the slots.
        free: indices of the allocations that no later step uses.
    """

    run: Callable[..., None]
    pieces: list[int] = field(default_factory=list)
    views: list[tuple[int, int, int]] = field(default_factory=list)
    tables: list[_Table] = field(default_factory=list)
    pick: Callable[[Sequence[Any]], Any] = tuple
    free: list[int] = field(default_factory=list)


class Recording:
    """Records what a call does on the device; gpu.py reports each allocation and launch."""

    launches = True

    def __init__(self, call: Call) -> None:
        self._call = call
        self._inputs = {id(tensor): number for number, tensor in enumerate(call.tensors)}
        # The arguments' addresses, the stream, and values that `_fresh` adds.
        self._slots: list[Any] = [None] * (len(call.tensors) + 1)
        self._views: dict[tuple[int, int], int] = {}
        self._pieces: list[_Piece] = []
        self._made: dict[int, int] = {}
        # A weak reference keeps the storage's id from being reused; the memory itself may be freed.
        self._storages: list[StorageWeakRef] = []
        self._steps: list[_Step] = []
        self._unreplayable = False

    def not_replayable(self) -> None:
        """Report that the call did something that a plan cannot repeat."""
        self._unreplayable = True

    def allocated(self, tensor: Tensor, allocate: Callable[[], Tensor], blank: bool) -> None:
        """Report an allocation; blank: it is uninitialised."""
        if self._unreplayable:
            return
        storage = StorageWeakRef(tensor.untyped_storage())
        self._storages.append(storage)
        self._made[storage.cdata] = len(self._pieces)
        self._pieces.append(_Piece(allocate, blank, tensor.shape, tensor.dtype, tensor.data_ptr()))

    def launched(self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any]) -> None:
        """Report a launch of a kernel with these arguments, for which Triton ran `compiled`."""
        if self._unreplayable:
            return
        found = None
        if not callable(grid) and len(args) == len(kernel.arg_names):
            found = gpu.relaunch(compiled, grid, args)
        if found is None:
            self._unreplayable = True
            return
        run, given = found
        step = _Step(run)
        self._steps.append(step)
        step.pick = operator.itemgetter(*[self._slot(arg, step) for arg in given])

    def plan(self, result: Any) -> Plan | None:
        """The plan of the recorded call, which returned `result`; None if it cannot be replayed."""
        parts = result if isinstance(result, tuple) else () if result is None else (result,)
        sources = [source for source in map(self._source, parts) if source is not None]
        # A call without launches may have done its work by other means.
        if self._unreplayable or len(sources) < len(parts) or not self._steps:
            return None
        shared = self._share({-1 - source for source in sources})
        single = isinstance(result, Tensor)
        return Plan(self._slots, self._pieces, self._steps, shared, sources, single)

    def _share(self, kept: set[int]) -> _Shared | None:
        """Make one allocation of the small pieces that are not `kept` as results; the others are
        freed after the last step that uses them."""
        parts: dict[int, tuple[int, int]] = {}
        size = 0
        for number, piece in enumerate(self._pieces):
            if piece.slot < 0 or number in kept:
                continue
            if piece.blank and size + piece.size <= SHARED_BYTES:
                parts[number] = piece.slot, size
                size += -(-piece.size // _APART) * _APART
            else:
                self._steps[piece.last].free.append(number)
        if not parts:
            return None
        for step in self._steps:
            step.pieces = [number for number in step.pieces if number not in parts]
        allocate = gpu.allocator((size,), (1,), torch.uint8, self._call.tensors[0].device)
        return _Shared(allocate, list(parts.values()))

    def _source(self, result: Any) -> int | None:
        """Index i of the argument that a result is, or -1 - i for piece i."""
        if id(result) in self._inputs:
            return self._inputs[id(result)]
        if not isinstance(result, Tensor):
            return None
        number = self._made.get(result.untyped_storage()._cdata)
        if number is None:
            return None
        piece = self._pieces[number]
        whole = result.shape == piece.shape and result.dtype == piece.dtype
        return -1 - number if whole and result.is_contiguous() else None

    def _slot(self, arg: Any, step: _Step) -> int:
        """The slot of an argument of a launch."""
        if arg is gpu.STREAM:
            return len(self._call.tensors)
        if not isinstance(arg, Tensor):
            return self._table(arg, step) if gpu.is_descriptor(arg) else self._fresh(arg)
        if id(arg) in self._inputs:
            return self._inputs[id(arg)]
        storage = arg.untyped_storage()
        number = self._made.get(storage._cdata)
        if number is None:
            base, start = self._behind(arg)
        else:
            piece = self._pieces[number]
            if piece.slot < 0:
                piece.slot = self._fresh(None)
                step.pieces.append(number)
            piece.last = len(self._steps) - 1
            base, start = piece.slot, piece.start
        offset = arg.data_ptr() - start
        if offset == 0:
            return base
        if (base, offset) not in self._views:
            self._views[base, offset] = self._fresh(None)
            step.views.append((self._views[base, offset], base, offset))
        return self._views[base, offset]

    def _table(self, arg: Any, step: _Step) -> int:
        """The slot of a tensor descriptor."""
        slot = self._fresh(None)
        rest = {name: value for name, value in vars(arg).items() if name != "base"}
        step.tables.append(_Table(slot, self._slot(arg.base, step), type(arg), rest))
        return slot

    def _behind(self, view: Tensor) -> tuple[int, int]:
        """Slot and address of the only argument whose memory contains the start of a view."""
        storage, at = view.untyped_storage()._cdata, view.data_ptr()
        found = {
            start: number
            for number, start in enumerate(self._call.addresses)
            if (tensor := self._call.tensors[number]).untyped_storage()._cdata == storage
            and start <= at < start + _extent(tensor)
        }
        if len(found) != 1:
            self._unreplayable = True
            return 0, at
        ((start, number),) = found.items()
        return number, start

    def _fresh(self, value: Any) -> int:
        """A new slot that holds a value."""
        self._slots.append(value)
        return len(self._slots) - 1


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in sides) + 1) * tensor.itemsize


class _Shared(NamedTuple):
    """The shared allocation of small pieces.

    Attributes:
        allocate: function that allocates it.
        parts: (slot, offset in bytes) of each piece.
    """

    allocate: Callable[[], Tensor]
    parts: list[tuple[int, int]]


class Plan:
    """The launches of a call, replayable with other argument addresses; made by
    `Recording.plan`."""

    def __init__(
        self,
        slots: list[Any],
        pieces: list[_Piece],
        steps: list[_Step],
        shared: _Shared | None,
        sources: list[int],
        single: bool,
    ) -> None:
        self._slots, self._pieces, self._sources, self._single = slots, pieces, sources, single
        self._steps = [(s.pieces, s.views, s.tables, s.run, s.pick, s.free) for s in steps]
        self._shared = shared
        # Only an empty result is written by no kernel.
        self._rest = [-1 - s for s in sources if s < 0 and pieces[-1 - s].slot < 0]

    def run(self, call: Call, stream: Any) -> Any:
        """Repeat the launches on a stream (the integer that Triton passes) and return the call's
        result."""
        slots = self._slots.copy()
        slots[: len(call.addresses) + 1] = (*call.addresses, stream)
        memory: dict[int, Tensor] = {}
        if self._shared is not None:
            together = self._shared.allocate()
            start = together.data_ptr()
            for slot, offset in self._shared.parts:
                slots[slot] = start + offset
        for pieces, views, tables, run, pick, free in self._steps:
            for number in pieces:
                piece = self._pieces[number]
                memory[number] = taken = piece.allocate()
                slots[piece.slot] = taken.data_ptr()
            for slot, base, offset in views:
                slots[slot] = slots[base] + offset
            for table in tables:
                slots[table.slot] = table.at(slots[table.start])
            run(*pick(slots))
            for number in free:
                del memory[number]
        for number in self._rest:
            memory[number] = self._pieces[number].allocate()
        results = [call.tensors[s] if s >= 0 else memory[-1 - s] for s in self._sources]
        return results[0] if self._single else tuple(results) if results else None


def mark_not_replayable() -> None:
    """Mark this thread's recording as not replayable, before work other than a launch."""
    if gpu.watch.observer is not None:
        gpu.watch.observer.not_replayable()
