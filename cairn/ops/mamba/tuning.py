"""Tuning constants of the kernels of the convolution and of the gated delta rule."""

from __future__ import annotations

import torch

CONV_TOKENS, CONV_CHANNELS, CONV_WARPS = 32, 128, 4
"""Tokens, channels and warps of a program of `conv_tokens_kernel`."""
CONV_EACH, CONV_EACH_WARPS = 256, 4
"""Channels and warps of a program of `conv_sequences_kernel`."""
CHUNK_WARPS = 4
"""Warps per program of `chunk_kernel`."""
TABLE = 64
"""Entries of the chunk table per program."""
BUSY = 128
"""With at least this many states, fewer and larger programs per state still fill a GPU."""


def in_chunks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether long sequences run in chunks. In float32 on a GPU they do not: without tensor cores
    these kernels take minutes to compile."""
    return device.type != "cuda" or dtype != torch.float32


def recurrent(high: int, wide: int) -> tuple[int, int]:
    """Rows of the state [high, wide] per program, and its warps: 32 elements per thread."""
    rows = min(16, 1 << (high - 1).bit_length())
    return rows, min(8, max(1, rows * wide // 1024))


def carry(states: int, high: int) -> tuple[int, int, int]:
    """Columns of a state [K, high] per program, its warps, and the stages of its loop over chunks:
    at least 2, because with 1 stage Triton 3.6 reads beyond shared memory."""
    most = 64 if states >= BUSY else 32
    return max(16, min(most, 1 << (high - 1).bit_length())), 4, 2
