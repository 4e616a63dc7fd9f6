"""Pages in host memory, and a cache of them in frames on the device (the host tier).

The unit of the cache is a *sheet*: the keys and values of one KV head in one page of one layer
(`PageField.selected` marks the fields). The device has a fixed number of *frames*, each of which
holds a sheet, for every layer and head, and a map from pages to frames. Only kernels read and
change both (`cairn.ops.resolve_frames`), so no decode step waits for the host. Completed pages are
written to host memory at once, so a frame is never written back.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self

import torch
from torch import Tensor

from cairn.cache.schema import PageField
from cairn.errors import OutOfMemory

NOWHERE = -(1 << 31)
"""`FrameMap.frame_of` of a page without a frame."""
NUMBERS = 4
"""Numbers of a head's `state`: the position of the clock hand, the number of the last call, hits
and misses."""
_FOR_ALL_AND_MAPPED = 3
"""Flags of cudaHostRegister: for all contexts (1), mapped into the device's address space (2)."""

MEASURED_BYTES = 64 << 20
"""Bytes of the copy that measures the rate between host memory and the device: about a millisecond
over PCIe 5."""


class FrameMap(NamedTuple):
    """Which frames hold which pages, for H heads of one layer or of several. See
    `cairn.ops.resolve_frames`.

    Attributes:
        frame_of: [H, pages] int32, the frame of each page; below 0: none.
        page_in: [H, frames] int32, the page in each frame; out of date unless `frame_of` agrees.
        used: [H, frames] int64, the number of the last call that selected the frame's page.
        state: [H, NUMBERS] int64.
    """

    frame_of: Tensor
    page_in: Tensor
    used: Tensor
    state: Tensor

    @classmethod
    def empty(cls, heads: int, pages: int, frames: int, device: torch.device | str) -> Self:
        """A map in which no page has a frame."""
        return cls(
            torch.full((heads, pages), NOWHERE, dtype=torch.int32, device=device),
            torch.full((heads, frames), -1, dtype=torch.int32, device=device),
            torch.zeros((heads, frames), dtype=torch.int64, device=device),
            torch.zeros((heads, NUMBERS), dtype=torch.int64, device=device),
        )

    def part(self, heads: slice) -> FrameMap:
        """The map of some of the heads; its tensors are views."""
        return FrameMap(*(tensor[heads] for tensor in self))


class Frames:
    """The pages in host memory of all layers that keep some there, and their frames. These layers
    must have equal fields. Memory is not initialised: the map says which frames hold a page.

    Args:
        layers: numbers of the layers.
        fields: the two fields, keys and values, of each of them.
        pages: pages in host memory.
        count: frames of each layer and head.
        device: where the frames are, and whose address space host memory is mapped into.

    Attributes:
        host: field name -> [layers, pages, heads, ...], in host memory.
        cached: field name -> [layers, count, heads, ...], the frames.
        map: the map of the heads of all layers, one layer after the other.
        numbers: [1, count] int32, 0 .. count - 1: the page table of a row whose pages are frames.
        sheet_bytes: bytes of one sheet.
    """

    def __init__(
        self,
        layers: Sequence[int],
        fields: Sequence[PageField],
        pages: int,
        count: int,
        device: torch.device | str,
    ) -> None:
        self.layers, self.count, self.heads = tuple(layers), count, fields[0].shape[0]
        self.host = {
            entry.name: host_tensor((len(layers), pages, *entry.shape), entry.dtype, device)
            for entry in fields
        }
        self.cached = {
            entry.name: torch.empty(
                (len(layers), count, *entry.shape), dtype=entry.dtype, device=device
            )
            for entry in fields
        }
        self.sheet_bytes = sum(entry.nbytes for entry in fields) // self.heads
        self.map = FrameMap.empty(len(layers) * self.heads, pages, count, device)
        self.numbers = torch.arange(count, dtype=torch.int32, device=device)[None]

    def of_layer(self, place: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Keys and values of one layer, in host memory and in frames."""
        (host_k, host_v), (k, v) = self.host.values(), self.cached.values()
        return (host_k[place], host_v[place]), (k[place], v[place])

    def map_of(self, place: int) -> FrameMap:
        """The map of one layer's heads."""
        return self.map.part(slice(place * self.heads, (place + 1) * self.heads))

    def forget(self) -> None:
        """Empty all frames."""
        self.map.frame_of.fill_(NOWHERE)

    def fill_rate(self) -> float:
        """Bytes a second that copies from host memory into the frames of a layer reach, measured on
        a GPU; no frame may hold a page yet."""
        page_bytes = self.heads * self.sheet_bytes
        count = min(self.count, self.map.frame_of.shape[1], MEASURED_BYTES // page_bytes)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The first copy pays for what CUDA sets up and is not counted.
        for event in (begin, end):
            for sources, places in zip(*self.of_layer(0), strict=True):
                places[:count].copy_(sources[:count])
            event.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return 1e3 * count * page_bytes / milliseconds

    def traffic(self) -> tuple[int, int, int]:
        """Hits, misses (sheets, each counted once a call) and the bytes that misses fetched since
        the start; waits for the device."""
        hits, misses = self.map.state[:, 2:].sum(0).tolist()
        return hits, misses, misses * self.sheet_bytes


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Locked host memory that is mapped into a device's address space, as a tensor of the device;
    on the CPU an ordinary tensor.

    Raises OutOfMemory if so much cannot be locked.
    """
    device, nbytes = torch.device(device), math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or not nbytes:
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.cuda.device(device):
        mapped = torch.as_tensor(_Locked(huge_pages(nbytes)), device=device)
    return mapped.view(dtype).view(shape)


def huge_pages(nbytes: int) -> Tensor:
    """Zeroed host memory in huge pages where the system has them: as [nbytes] uint8.

    It is touched by several threads, because the OS clears a page at its first access and locking
    untouched memory does that in one thread. It is private: shared memory, which `mmap` gives by
    default, does not get huge pages unless a setting of the system (`shmem_enabled`) says so.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                pages.madvise(getattr(mmap, advice))
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(Tensor.zero_, memory[:: mmap.PAGESIZE].split(1 << 14)):
            pass
    return memory


class _Locked:
    """Locked host memory with the array interface by which torch wraps device memory; unlocked with
    the last tensor over it. torch's allocator of pinned memory rounds sizes up to powers of two."""

    def __init__(self, memory: Tensor) -> None:
        address, nbytes = memory.data_ptr(), memory.nbytes
        status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _FOR_ALL_AND_MAPPED))
        if status:
            raise OutOfMemory(
                f"{nbytes} bytes of host memory cannot be locked (CUDA error {status})",
                "Lower kv_host_memory (--kv-host-memory), or raise the limit with ulimit -l",
            )
        weakref.finalize(self, _unlock, memory)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
