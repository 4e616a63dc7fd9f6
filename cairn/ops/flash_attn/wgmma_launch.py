"""How flash attention is launched in groups of warps."""

from __future__ import annotations

import math

from cairn.ops import gpu
from cairn.ops.attention.tma import are_lines, lines_of
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.flash_attn.launch import Task, caches, flops_of
from cairn.ops.flash_attn.tuning import TUNING
from cairn.ops.flash_attn.wgmma import flash_groups_kernel

BLOCKS = {64: 2, 128: 2, 256: 1}
"""Blocks of keys that a group multiplies at once, by the width of a head: with heads of 256 the
sums fill the registers."""


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
        or width not in BLOCKS
        or task.v.shape[-1] != width
        or (task.page_table is not None and task.k.shape[1] % TUNING.wgmma_block)
        or task.capacity < 2 * TUNING.wgmma_block
        or flops_of(task) < ATTENTION_TUNING.tma_min_flops
    ):
        return False
    tokens, heads = _tile(task)
    programs = task.batch * -(-task.max_seqlen_q // tokens) * _columns(task, heads)
    filled = programs >= TUNING.wgmma_full * gpu.sm_count(task.q.device)
    return (
        tokens <= task.max_seqlen_q
        and filled
        and all(are_lines(x, TUNING.wgmma_block) for x in caches(task))
    )


def attend(task: Task, length: int | None = None) -> None:
    """Write o and lse of a task that `fits`; length: keys of every sequence, where the task does
    not say."""
    keys, values = lines_of(*caches(task), TUNING.wgmma_block, math.inf)
    blocks = (TUNING.wgmma_block, TUNING.wgmma_block)
    tokens, heads = _tile(task)
    count = -(-task.max_seqlen_q // tokens)
    paged = task.page_table is not None
    arguments = task.arguments()
    if length is not None:
        arguments["capacity"] = length
    flash_groups_kernel[(count * task.batch, _columns(task, heads))](
        **gpu.select_arguments(flash_groups_kernel, arguments),
        o=task.o,
        keys=gpu.gluon_descriptor(keys.blocks, blocks),
        values=gpu.gluon_descriptor(values.blocks, blocks),
        tiles=count,
        lse_token=task.lse.stride(-1),
        k_page=keys.page,
        k_head=keys.head,
        k_column=keys.column,
        v_page=values.page,
        v_head=values.head,
        v_column=values.column,
        SIZE=task.k.shape[1] if paged else 1,
        TOKENS=tokens,
        HP=heads,
        KEYS=BLOCKS[task.k.shape[-1]] * TUNING.wgmma_block,
        STAGES=TUNING.wgmma_stages,
        PAGED=paged,
        SINKS=task.sinks is not None,
        num_warps=4,
    )


def _tile(task: Task) -> tuple[int, int]:
    """Queries and heads of a program."""
    heads = min(TUNING.wgmma_lines, gpu.next_power_of_2(task.group))
    return TUNING.wgmma_lines // heads, heads


def _columns(task: Task, heads: int) -> int:
    """Programs of the same queries."""
    return int(task.k.shape[-2]) * -(-task.group // heads)
