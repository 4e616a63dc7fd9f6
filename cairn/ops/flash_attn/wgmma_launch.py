"""How flash attention is launched in groups of warps."""

from __future__ import annotations

import math

from cairn.ops import gpu
from cairn.ops.attention.tma import are_lines, lines_of
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.flash_attn.launch import Task, caches, flops_of, lse_strides
from cairn.ops.flash_attn.strides import strides
from cairn.ops.flash_attn.tuning import TUNING
from cairn.ops.flash_attn.wgmma import flash_groups_kernel

WIDTHS = (64, 128)


def fits(task: Task) -> bool:
    """Whether `attend` takes a task: a prefill with many lines, without windows and scales."""
    width = task.k.shape[-1]
    tensors = (task.q, task.k, task.v, task.o)
    plain = task.qv is None and not task.softcap and task.scale > 0 and task.leftpad is None
    scaled = (task.q_descale, task.k_descale, task.v_descale)
    if (
        not gpu.supports_wgmma(task.q.device)
        or not plain
        or any(scale is not None for scale in scaled)
        or task.left >= 0
        or task.chunk
        or any(x.dtype != task.q.dtype or x.dtype.itemsize != 2 for x in tensors)
        or task.q.stride(-1) != 1
        or width not in WIDTHS
        or task.v.shape[-1] != width
        or (task.page_table is not None and task.k.shape[1] % TUNING.wgmma_block)
        or task.capacity < 2 * TUNING.wgmma_block
        or flops_of(task) < ATTENTION_TUNING.tma_least_flops
    ):
        return False
    tokens, heads = _tile(task)
    programs = task.batch * -(-task.max_seqlen_q // tokens) * _columns(task, heads)
    filled = programs >= TUNING.wgmma_full * gpu.processors(task.q.device)
    return (
        tokens <= task.max_seqlen_q
        and filled
        and all(are_lines(x, TUNING.wgmma_block) for x in caches(task))
    )


def attend(task: Task, length: int | None = None) -> None:
    """Write o and lse of a task that `fits`; length: keys of every sequence, where the task does
    not say."""
    q, k = task.q, task.k
    keys, values = lines_of(*caches(task), TUNING.wgmma_block, math.inf)
    blocks = (TUNING.wgmma_block, TUNING.wgmma_block)
    tokens, heads = _tile(task)
    count = -(-task.max_seqlen_q // tokens)
    paged = task.page_table is not None
    flash_groups_kernel[(count * task.batch, _columns(task, heads))](
        *(q, task.o, task.lse, task.sinks),
        *(gpu.tiles(keys.blocks, blocks), gpu.tiles(values.blocks, blocks)),
        *(task.page_table, task.batch_idx, task.cu_seqlens_q, task.cu_seqlens_k),
        *(task.seqused_q, task.seqused_k, task.scale, task.right),
        *(task.batch, count, q.shape[-3], task.capacity if length is None else length),
        *(*strides(q), *strides(task.o), *lse_strides(task), task.lse.stride(-1)),
        0 if task.page_table is None else task.page_table.stride(0),
        *(*keys[1:], *values[1:]),
        *(q.shape[-2], k.shape[-2], q.shape[-1], k.shape[1] if paged else 1),
        *(tokens, heads, 2 * TUNING.wgmma_block, TUNING.wgmma_stages),
        *(paged, task.sinks is not None),
        num_warps=4,
    )


def _tile(task: Task) -> tuple[int, int]:
    """Queries and heads of a program."""
    heads = min(TUNING.wgmma_lines, gpu.next_power_of_2(task.group))
    return TUNING.wgmma_lines // heads, heads


def _columns(task: Task, heads: int) -> int:
    """Programs of the same queries."""
    return int(task.k.shape[-2]) * -(-task.group // heads)
