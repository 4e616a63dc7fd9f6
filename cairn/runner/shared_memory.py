"""Host memory of a rank's records that other ranks on the same host can map.

It has no name in the file system and is freed with the last process that holds it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cairn.errors import EngineDead


class SharedMemory:
    """Records of all kinds, then their checksums.

    Args:
        descriptor: of the memory.
        counts, sizes: records of each kind, and bytes of one.

    Attributes:
        rows: by kind, [count, size] uint8.
        sums: by kind, [count] uint64.
        address: process and descriptor by which another process finds it.
    """

    def __init__(self, descriptor: int, counts: Sequence[int], sizes: Sequence[int]) -> None:
        self.address = os.getpid(), descriptor
        self._descriptor = descriptor
        mapped = memoryview(mmap.mmap(descriptor, self.length(counts, sizes)))
        self.rows: list[NDArray[np.uint8]] = []
        self.sums: list[NDArray[np.uint64]] = []
        begin = 0
        for count, size in zip(counts, sizes, strict=True):
            end = begin + count * size
            rows = np.frombuffer(mapped[begin:end], dtype=np.uint8)
            self.rows.append(rows.reshape(count, size))
            begin = end
        for count in counts:
            end = begin + count * 8
            self.sums.append(np.frombuffer(mapped[begin:end], dtype=np.uint64))
            begin = end

    def close(self) -> None:
        """Close the descriptor: no other process can map it from now on; existing mappings stay."""
        os.close(self._descriptor)

    @staticmethod
    def length(counts: Sequence[int], sizes: Sequence[int]) -> int:
        """Its size in bytes."""
        return sum(count * (size + 8) for count, size in zip(counts, sizes, strict=True))

    @classmethod
    def new(cls, counts: Sequence[int], sizes: Sequence[int]) -> SharedMemory:
        """Allocate zeroed memory in this process."""
        descriptor = os.memfd_create("cairn-records", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, cls.length(counts, sizes))
        return cls(descriptor, counts, sizes)

    @classmethod
    def of(
        cls, address: tuple[int, int], counts: Sequence[int], sizes: Sequence[int]
    ) -> SharedMemory:
        """Map the memory of another process. Raises EngineDead if the system refuses it."""
        process, number = address
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise EngineDead(
                f"the records of process {process} cannot be mapped: {error}",
                "Ranks that transfer records must be of one user, on one host with /proc",
            ) from None
        found = cls(descriptor, counts, sizes)
        found.close()
        return found
