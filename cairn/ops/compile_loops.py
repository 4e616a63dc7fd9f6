"""The CPU's loops are compiled before the first request waits for them."""

from __future__ import annotations

import functools
import logging
import time

import torch

from cairn import ops
from cairn.ops import cpu
from cairn.ops.attention.tiles import FEW_TOKENS
from cairn.ops.cpu import avx512

log = logging.getLogger(__name__)

LONG = 5.0
"""Seconds of compiling that a user is told about: the first time on a machine."""


@functools.cache
def compile_loops(dtype: torch.dtype) -> None:
    """Run every loop on a few numbers: what is compiled depends on their dtype alone.

    A process does it once for a dtype, a machine keeps what it compiled.
    """
    if not cpu.AVAILABLE:
        return
    began = time.perf_counter()
    for width in (8, 2 * avx512.LANES):
        _run_rows(dtype, width)
    _run_attention(dtype, 2, 8)
    # What lanes and tiles take.
    if dtype == torch.bfloat16:
        _run_attention(dtype, 64, 64)
    seconds = time.perf_counter() - began
    level = logging.WARNING if seconds > LONG else logging.INFO
    log.log(level, "compiled the loops for this CPU in %.1f s", seconds)


def _run_rows(dtype: torch.dtype, width: int) -> None:
    """Norms, gates and products, of one token and of several."""
    norm, weight = torch.ones(width, dtype=dtype), torch.ones(2 * width, width, dtype=dtype)
    for tokens in (1, FEW_TOKENS):
        x = torch.ones(tokens, width, dtype=dtype)
        ops.linear(x, weight, None, norm)
        ops.linear(x, weight, None, norm, dtype=torch.float32)
        ops.linear_add(x, torch.ones(tokens, 2 * width, dtype=dtype), weight)
        ops.gated_linear(x, weight, norm)
        ops.rmsnorm(x, norm)


def _run_attention(dtype: torch.dtype, size: int, dim: int) -> None:
    """From projections to attention, over two pages of `size` slots: one token, then several."""
    k, v = (torch.ones(2, 1, size, dim, dtype=dtype) for _ in range(2))
    key, bias = torch.ones(2, 1, dim, dtype=dtype), torch.ones(2, 1)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    for tokens in (1, FEW_TOKENS + 1):
        row, slot = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), size)
        given, angles = torch.ones(tokens, 4 * dim, dtype=dtype), torch.ones(tokens, dim)
        q, z = ops.heads_into_cache(given, None, torch.ones(3, dim), angles, k, v, row, 1)
        ops.window_attention(q, k, v, row, slot, table, 1, dtype=dtype)
        ops.landmark_attention(q, z, k, v, key, bias, row, slot, table, 1, 1, True)
    # Neighbours that share no pages go page by page.
    indices = (torch.arange(tokens) % 2).int().view(tokens, 1, 1)
    ops.page_attention(q, k, v, row, table, indices, torch.ones(tokens, 1, 1))
