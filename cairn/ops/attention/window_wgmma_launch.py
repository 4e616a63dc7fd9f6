"""How attention over windows is launched in groups of warps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.launch import Task, accepts
from cairn.ops.attention.tma import are_lines, lines_of
from cairn.ops.attention.window_wgmma import window_groups_kernel

LINES, BLOCK = 128, 64
"""Lines of a tile, and slots of a block."""
STAGES = {64: 4, 128: 2}
"""Pairs of blocks of keys and of values that a program has or that are on their way, by a head's
width."""
FULL = 0.75
"""Share of a device's processors that have a tile at least, of wide heads. On an H100, with a
window of 512, 32 heads of 128 take 22 to 33% less than in `tile_kernel`'s tiles from 1,024 tokens
on, and 6% more with 256. Narrow ones are left to those: 16 heads of 64 that share 2 take as long
from 2,048 tokens on."""


def fits(task: Task) -> bool:
    """Whether `attend` takes a task: whole blocks in a page, and heads that tiles are made for."""
    q, k_cache, v_cache = task.q, task.k_cache, task.v_cache
    return (
        gpu.supports_wgmma(q.device)
        and q.dtype.itemsize == 2
        and k_cache.dtype == q.dtype
        and q.shape[2] in STAGES
        and k_cache.shape[2] % BLOCK == 0
        and task.window > 0
        and (task.scale is None or task.scale > 0)
        and accepts(q, k_cache, v_cache)
        and all(are_lines(cache.transpose(1, 2), BLOCK) for cache in (k_cache, v_cache))
    )


def worthwhile(task: Task) -> bool:
    """Whether a task that `fits` takes no longer than in tiles one by one."""
    return task.width > 64 and tiles(task) >= FULL * gpu.processors(task.q.device)


def tiles(task: Task) -> int:
    """Of a task that `fits`."""
    return -(-task.q.shape[0] // (LINES // task.group)) * int(task.k_cache.shape[1])


def programs(task: Task) -> int:
    """That share the tiles of a task."""
    return min(tiles(task), gpu.processors(task.q.device))


def tables(task: Task) -> tuple[tuple[Any, Any], tuple[int, ...]]:
    """Keys and values of a task that `fits` in blocks, and from page to page and from head to head
    the lines of keys and those of values."""
    caches = (task.k_cache.transpose(1, 2), task.v_cache.transpose(1, 2))
    keys, values = lines_of(*caches, BLOCK, math.inf)
    blocks = (BLOCK, BLOCK)
    places = (keys.page, keys.head, values.page, values.head)
    return (gpu.tiles(keys.blocks, blocks), gpu.tiles(values.blocks, blocks)), places


def attend(task: Task, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """o [T, h_q, d] of a dtype and lse [T, h_q] float32, of a task that `fits`."""
    o, lse = task.empty(dtype=dtype)
    if not len(o):
        return o, lse
    heads, kv_heads, dim, size = task.shape()
    window, factor, table_stride, *_ = task.numbers()
    blocks, places = tables(task)
    window_groups_kernel[(programs(task),)](
        *(task.q, *blocks, task.row, task.slot, task.page_table, o, lse),
        *(len(o), window, factor, table_stride, *places),
        *(heads, kv_heads, dim, size, LINES // task.group, task.group, STAGES[dim]),
        *(task.aligned, task.mask_landmarks),
        num_warps=4,
    )
    return o, lse
