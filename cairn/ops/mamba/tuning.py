"""Constants of this family's launches."""

from __future__ import annotations

import torch

CONV_TOKENS, CONV_CHANNELS, CONV_WARPS = 32, 128, 4
"""Tokens and channels of a program of the convolution by tokens."""
CONV_EACH, CONV_EACH_WARPS = 256, 4
"""Channels of a program of the convolution by sequences."""
CHUNK_WARPS = 4
BUSY = 512
"""States of which a few programs each fill a GPU."""


def recurrent(states: int, high: int, wide: int) -> tuple[int, int]:
    """Rows of the state [high, wide] that a program holds, and its warps: 32 numbers a thread. With
    few states there are more programs."""
    rows = min(32 if states >= BUSY else 8, 1 << (high - 1).bit_length())
    return rows, min(8, max(1, rows * wide // 1024))


def carry(states: int, high: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Columns of a state [K, high] that a program holds, its warps, and how many chunks ahead it
    loads."""
    most = 64 if states >= BUSY // 4 else 32
    block = max(16, min(most, 1 << (high - 1).bit_length()))
    return (block, 4, 2) if dtype != torch.float32 else (min(block, 32), 4, 1)
