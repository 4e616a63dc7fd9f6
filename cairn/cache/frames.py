"""Pages in host memory, and the frames on the device into which what queries select of them comes.

Of a field in host memory (`PageField.selected`) a page's part of one head is a *sheet*. The device
holds a bounded number of sheets of each layer and head in *frames*, and a map from pages to frames,
both used and changed by kernels alone (`cairn.ops.resolve_frames`): no step waits for the host.
Pages are written through to host memory as they are completed, so a frame is never written back.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from cairn.cache.schema import PageField
from cairn.errors import OutOfMemory

NOWHERE = -(1 << 31)
"""In the map, of a page without a frame."""
NUMBERS = 4
"""Of a head's `state`: where the search for a frame goes on, the number of the last call, sheets
that were found in frames and sheets that were fetched."""
_FOR_ALL_AND_MAPPED = 3
"""Flags of cudaHostRegister: for all contexts, and in the device's address space."""


class Frames:
    """The frames of one layer.

    Memory of frames is not initialised: the map says which hold something.

    Args:
        fields: those in host memory, each a page [heads, ...].
        pages: how many there are.
        count: frames of a head.
        device: where they are.

    Attributes:
        tensors: field name -> [count, heads, ...].
        frame_of: [heads, pages] int32, the frame of each page; below 0: none.
        page_in: [heads, count] int32, the page in each frame; of one that has left the map: stale.
        used: [heads, count] int64, the call that read each frame last.
        state: [heads, NUMBERS] int64.
        numbers: [1, count] int32, 0 and up: a page table in which pages are frames.
    """

    def __init__(
        self, fields: list[PageField], pages: int, count: int, device: torch.device | str
    ) -> None:
        heads = fields[0].shape[0]
        self.tensors = {
            entry.name: torch.empty((count, *entry.shape), dtype=entry.dtype, device=device)
            for entry in fields
        }
        self.sheet_bytes = sum(entry.nbytes for entry in fields) // heads
        int32, int64 = torch.int32, torch.int64
        self.frame_of = torch.full((heads, pages), NOWHERE, dtype=int32, device=device)
        self.page_in = torch.full((heads, count), -1, dtype=int32, device=device)
        self.used = torch.zeros((heads, count), dtype=int64, device=device)
        self.state = torch.zeros((heads, NUMBERS), dtype=int64, device=device)
        self.numbers = torch.arange(count, dtype=int32, device=device)[None]

    @property
    def count(self) -> int:
        """Frames of a head."""
        return self.page_in.shape[1]


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory of the host that a device reads and writes in place, as a tensor of that device.

    Raises OutOfMemory where so much cannot be locked.
    """
    device = torch.device(device)
    memory = torch.empty(shape, dtype=dtype)
    if device.type != "cuda" or not memory.numel():
        return memory.to(device)
    with torch.cuda.device(device):
        mapped = torch.as_tensor(_Locked(memory), device=device)
    return mapped.view(dtype).view(shape)


class _Locked:
    """Locked memory, described as torch takes memory of a device; freed with the last tensor over
    it. Torch's own allocator of pinned memory would round sizes up to powers of two."""

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
