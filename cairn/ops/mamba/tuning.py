"""Tuning constants of the kernels of the convolution and of the gated delta rule."""

from __future__ import annotations

import torch

CONV_TOKENS, CONV_CHANNELS, CONV_WARPS = 16, 512, 4
"""Tokens, channels and warps of a program of `conv_tokens_kernel`."""
CONV_EACH, CONV_EACH_WARPS = 256, 4
"""Channels and warps of a program of `conv_sequences_kernel`."""
CHUNK_WARPS = 4
"""Warps per program of `chunk_kernel`."""
TABLE = 64
"""Entries of the chunk table per program."""
PROCESSORS = 132
"""Multiprocessors of a large device."""


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
    at least 2, because with 1 stage Triton 3.6 reads beyond shared memory. With 3 stages one
    program fits a multiprocessor, so programs hold as few columns as run at once: 8,192 tokens of
    16 heads take 163 us on an H200, 332 us in blocks of 64 columns and 2 stages."""
    wide = 1 << (high - 1).bit_length()
    for block in (16, 32):
        if states * -(-wide // block) <= PROCESSORS:
            return block, 4, 3
    return max(16, min(64, wide)), 4, 2
