"""Settings of malloc and oneDNN that keep memory between steps."""

from __future__ import annotations

import ctypes
import os

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
KEPT_BYTES = 512 << 20
"""Freed bytes at the end of the heap that are kept instead of returned to the OS."""

KERNELS_KEPT = 128
"""Compiled matrix products that oneDNN caches. Each number of rows needs its own, of a third of a
megabyte or more; 128 are enough for some twenty numbers of rows, and compiling one again costs far
less than a prefill step."""
_CAPACITIES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def bound_kernel_caches() -> None:
    """Keep oneDNN's two caches of products small; call before the first product of the process.

    Each holds 1,024 by default: a server whose prompts have all lengths grows by a gigabyte before
    it stops. Values that the environment already has are left alone.
    """
    for name in _CAPACITIES:
        os.environ.setdefault(name, str(KERNELS_KEPT))


def keep_freed_memory() -> bool:
    """Let temporary tensors on the CPU reuse memory instead of returning it after every operation.

    By default glibc gives freed megabytes back at once, and the next operation waits while the
    kernel maps and clears each of their pages again. The heap grows to the largest step and at most
    `KEPT_BYTES` of it stay unused.

    Returns:
        Whether the C library took the settings; one other than glibc keeps its own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    kept = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
