"""How attention over windows is launched in groups of warps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.launch import Task, accepts
from cairn.ops.attention.tma import are_lines, lines_of
from cairn.ops.attention.tuning import TUNING
from cairn.ops.attention.window_wgmma import window_groups_kernel


def fits(task: Task) -> bool:
    """Whether `attend` takes a task: whole blocks in a page, and heads that tiles are made for."""
    q, k_cache, v_cache = task.q, task.k_cache, task.v_cache
    return (
        gpu.supports_wgmma(q.device)
        and q.dtype.itemsize == 2
        and k_cache.dtype == q.dtype
        and q.shape[2] in TUNING.window_stages
        and k_cache.shape[2] % TUNING.window_block == 0
        and task.window > 0
        and (task.scale is None or task.scale > 0)
        and accepts(q, k_cache, v_cache)
        and all(
            are_lines(cache.transpose(1, 2), TUNING.window_block) for cache in (k_cache, v_cache)
        )
    )


def worthwhile(task: Task) -> bool:
    """Whether a task that `fits` takes no longer than in tiles one by one."""
    return task.width > 64 and tiles(task) >= TUNING.window_full * gpu.processors(task.q.device)


def tiles(task: Task) -> int:
    """Of a task that `fits`."""
    return -(-task.q.shape[0] // (TUNING.window_lines // task.group)) * int(task.k_cache.shape[1])


def programs(task: Task) -> int:
    """That share the tiles of a task."""
    return min(tiles(task), gpu.processors(task.q.device))


def tables(task: Task) -> tuple[tuple[Any, Any], tuple[int, ...]]:
    """Keys and values of a task that `fits` in blocks, and from page to page and from head to head
    the lines of keys and those of values."""
    caches = (task.k_cache.transpose(1, 2), task.v_cache.transpose(1, 2))
    keys, values = lines_of(*caches, TUNING.window_block, math.inf)
    blocks = (TUNING.window_block, TUNING.window_block)
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
        *(
            heads,
            kv_heads,
            dim,
            size,
            TUNING.window_lines // task.group,
            task.group,
            TUNING.window_stages[dim],
        ),
        *(task.aligned, task.mask_landmarks),
        num_warps=4,
    )
    return o, lse
