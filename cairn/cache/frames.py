"""Pages in host memory, and frames on the device: a cache of the pages that queries select.

The unit is a *sheet*, the keys and values of one KV head in a page (`PageField.selected` marks the
fields). The device holds a bounded number of sheets of each layer and head in *frames*, and a map
from pages to frames. Kernels alone read and change both (`cairn.ops.resolve_frames`): no decode
step waits for the host. Pages are written to host memory when they are completed, so a frame is
never written back.
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
"""Value in the map of a page without a frame."""
NUMBERS = 4
"""Elements of a head's `state`: position at which the search for a frame continues, number of the
last call, sheets found in frames, sheets fetched."""
_FOR_ALL_AND_MAPPED = 3
"""Flags of cudaHostRegister: for all contexts, and in the device's address space."""


class FrameMap(NamedTuple):
    """The map between pages and frames, for H heads of some layers.

    Attributes:
        frame_of: [H, pages] int32, the frame of each page; below 0: none.
        page_in: [H, frames] int32, the page in each frame; stale for frames that have left the map.
        used: [H, frames] int64, the call that read each frame last.
        state: [H, NUMBERS] int64.
    """

    frame_of: Tensor
    page_in: Tensor
    used: Tensor
    state: Tensor

    @classmethod
    def empty(cls, heads: int, pages: int, frames: int, device: torch.device | str) -> Self:
        """An empty map: no frame holds a page."""
        return cls(
            torch.full((heads, pages), NOWHERE, dtype=torch.int32, device=device),
            torch.full((heads, frames), -1, dtype=torch.int32, device=device),
            torch.zeros((heads, frames), dtype=torch.int64, device=device),
            torch.zeros((heads, NUMBERS), dtype=torch.int64, device=device),
        )

    def part(self, heads: slice) -> FrameMap:
        """The part of the map for some of the heads."""
        return FrameMap(*(tensor[heads] for tensor in self))


class Frames:
    """Fields in host memory and their frames, for all layers with such fields, which must have
    equal fields. Memory of frames is not initialised: the map says which hold a sheet.

    Args:
        layers: indices of these layers.
        fields: the fields of each of them.
        pages: number of pages.
        count: frames per head.
        device: device of the frames.

    Attributes:
        far: field name -> [layers, pages, heads, ...] in host memory.
        near: field name -> [layers, count, heads, ...], the frames.
        map: the map for the heads of all layers, in the order of layers.
        numbers: [1, count] int32, 0, 1, 2, ...: a page table of frame indices.
        sheet_bytes: bytes of a sheet over all fields.
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
        self.far = {
            entry.name: host_tensor((len(layers), pages, *entry.shape), entry.dtype, device)
            for entry in fields
        }
        self.near = {
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
        k, v = self.far
        far, near = self.far, self.near
        return (far[k][place], far[v][place]), (near[k][place], near[v][place])

    def map_of(self, place: int) -> FrameMap:
        """The map of one layer."""
        return self.map.part(slice(place * self.heads, (place + 1) * self.heads))

    def forget(self) -> None:
        """Empty all frames."""
        self.map.frame_of.fill_(NOWHERE)

    def traffic(self) -> tuple[int, int, int]:
        """Sheets that were found in frames and sheets that were fetched, each counted once a call,
        and the bytes of the latter; waits for the device."""
        found, fetched = self.map.state[:, 2:].sum(0).tolist()
        return found, fetched, fetched * self.sheet_bytes


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Pinned host memory as a tensor of the device that reads and writes it in place.

    Raises OutOfMemory if it cannot be pinned.
    """
    device, nbytes = torch.device(device), math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or not nbytes:
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.cuda.device(device):
        mapped = torch.as_tensor(_Locked(_filled(nbytes)), device=device)
    return mapped.view(dtype).view(shape)


def _filled(nbytes: int) -> Tensor:
    """Memory in huge pages, touched in advance: pinning untouched memory takes a second per
    gigabyte."""
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(Tensor.zero_, memory.split(1 << 28)):
            pass
    return memory


class _Locked:
    """Pinned memory, exposed to torch by `__cuda_array_interface__`; freed with the last tensor
    over it. Torch's own allocator of pinned memory would round sizes up to powers of two."""

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
