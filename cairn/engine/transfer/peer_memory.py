"""Reads records in the memory of other GPUs of this host, over NVLink where there is any. The
memory is mapped by CUDA's inter-process handles."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec
import numpy as np
import torch
from torch import Tensor

from cairn.engine.transfer.agent import Ints, ReadFailed
from cairn.runner.device_records import DeviceRecords
from cairn.runner.record_fields import WORD
from cairn.specs.disaggregation import CUDA

BLOCK = 64 << 20
"""Bytes of records that are gathered at a time."""
MAX_PEERS = 8
"""Number of engines whose memory stays mapped."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """A tensor [count, size] uint8 of another process; the fields are those with which
    `torch.multiprocessing` shares a storage."""

    count: int
    size: int
    handle: bytes = b""
    storage_bytes: int = 0
    offset: int = 0
    counter: bytes = b""
    counter_offset: int = 0
    event: bytes = b""
    event_needed: bool = False


class PeerMemory:
    """An `Agent` for records in GPU memory.

    Args:
        records: all of them are shared.
    """

    backend = CUDA

    def __init__(self, records: DeviceRecords) -> None:
        self._records = records
        self.metadata = msgspec.msgpack.encode([share(rows) for rows in records.rows])
        self._opened: OrderedDict[bytes, list[Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        on_gpu = records.device.type == "cuda"
        self._stream = torch.cuda.Stream(records.device) if on_gpu else None

    def addresses(self, kinds: Ints, slots: Ints) -> Ints:
        """See `Agent`: the slots themselves."""
        return slots

    @torch.inference_mode()
    def read(self, metadata: bytes, kinds: Ints, slots: Ints, addresses: Ints) -> None:
        """See `Agent`."""
        try:
            theirs = self._rows_of(metadata)
            if len(theirs) != len(self._records.rows):
                raise RuntimeError(f"it has {len(theirs)} kinds of records")
            with torch.cuda.stream(self._stream):
                if self._stream is not None and self._records.loaded is not None:
                    # The previous records of these slots have been loaded.
                    self._stream.wait_event(self._records.loaded)
                for kind, rows in enumerate(self._records.rows):
                    of_kind = kinds == kind
                    _copy(rows, slots[of_kind], theirs[kind], addresses[of_kind])
            if self._stream is not None:
                self._stream.synchronize()
        except (RuntimeError, msgspec.MsgspecError) as error:
            raise ReadFailed(f"the memory of the peer's GPU cannot be read: {error}") from error

    def forget(self, metadata: bytes) -> None:
        """See `Agent`. A mapping keeps the memory of a process that has ended."""
        with self._lock:
            self._opened.pop(metadata, None)

    def _rows_of(self, metadata: bytes) -> list[Tensor]:
        with self._lock:
            if metadata not in self._opened:
                given = msgspec.msgpack.decode(metadata, type=list[Shared])
                self._opened[metadata] = [opened(each, self._records.device) for each in given]
                if len(self._opened) > MAX_PEERS:
                    self._opened.popitem(last=False)
            self._opened.move_to_end(metadata)
            return self._opened[metadata]


def _copy(rows: Tensor, slots: Ints, theirs: Tensor, sources: Ints) -> None:
    """rows[slots] = theirs[sources]: one copy where both are contiguous, otherwise in blocks."""
    count = len(slots)
    if not count:
        return
    if theirs.shape[1] != rows.shape[1] or sources.max() >= len(theirs):
        raise RuntimeError(f"its records are {list(theirs.shape)}, here {list(rows.shape)}")
    if (np.diff(slots) == 1).all() and (np.diff(sources) == 1).all():
        to, source = int(slots[0]), int(sources[0])
        rows[to : to + count].copy_(theirs[source : source + count], non_blocking=True)
        return
    words, its = rows.view(WORD), theirs.view(WORD)
    index, sources_on = (torch.from_numpy(each).to(rows.device) for each in (slots, sources))
    step = max(1, BLOCK // rows.shape[1])
    for begin in range(0, count, step):
        some = slice(begin, begin + step)
        words[index[some]] = its[sources_on[some]]


def share(rows: Tensor) -> Shared:
    """Share a tensor [count, size] uint8 with other processes."""
    if not rows.numel():
        return Shared(len(rows), rows.shape[1])
    _, *about = rows.untyped_storage()._share_cuda_()
    return Shared(len(rows), rows.shape[1], *about)


def opened(given: Shared, device: torch.device) -> Tensor:
    """Map a tensor of another process into the address space of a device. Raises RuntimeError."""
    if not given.handle:
        return torch.empty(given.count, given.size, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        given.handle,
        given.storage_bytes,
        given.offset,
        given.counter,
        given.counter_offset,
        given.event,
        given.event_needed,
    )
    flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return flat[: given.count * given.size].view(given.count, given.size)
