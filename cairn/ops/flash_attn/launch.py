"""How flash attention is launched: by its shapes, never by what lengths hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.launch import merged_columns, reading_wave, whole_waves
from cairn.ops.attention.tma import NO_LINES, Lines, lines_of
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.flash_attn.kernels import flash_kernel, join_splits_kernel
from cairn.ops.flash_attn.strides import named_strides
from cairn.ops.flash_attn.tuning import TUNING
from cairn.ops.pdl import pdl_option


@dataclass(frozen=True, slots=True)
class Task:
    """The arguments of `flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    page_table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    sinks: Tensor | None = None
    scale: float = 1.0
    left: int = -1
    right: int = -1
    chunk: int = 0
    softcap: float = 0.0
    max_seqlen_q: int = 0

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[-2] // self.k.shape[-2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the products: 8-bit numbers are exact in bfloat16."""
        return self.o.dtype if self.q.dtype.itemsize == 1 else self.q.dtype

    @property
    def capacity(self) -> int:
        """Most keys of a sequence."""
        if self.page_table is not None:
            return self.page_table.shape[1] * self.k.shape[1]
        return self.k.shape[-3]

    @property
    def longest(self) -> int:
        """The most keys that one sequence's queries see."""
        most = self.capacity
        if self.left >= 0 and self.right >= 0:
            most = min(most, self.left + self.right + self.max_seqlen_q)
        return min(most, self.chunk + self.max_seqlen_q) if self.chunk else most

    def arguments(self) -> dict[str, Any]:
        """What the kernels of a task take but its output, by the names of their parameters."""
        *ahead, lse_head, _ = self.lse.stride()
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "qv": self.qv,
            "lse": self.lse,
            "sinks": self.sinks,
            "page_table": self.page_table,
            "batch_idx": self.batch_idx,
            "leftpad": self.leftpad,
            "cu_q": self.cu_seqlens_q,
            "cu_k": self.cu_seqlens_k,
            "used_q": self.seqused_q,
            "used_k": self.seqused_k,
            "q_descale": self.q_descale,
            "k_descale": self.k_descale,
            "v_descale": self.v_descale,
            "scale": self.scale,
            "cap": self.softcap,
            "left": self.left,
            "right": self.right,
            "chunk": self.chunk,
            "batch": self.batch,
            "even": self.q.shape[-3],
            "capacity": self.capacity,
            **named_strides("q", self.q, "batch", "token", "head"),
            **named_strides("qv", self.qv, "batch", "token", "head"),
            **named_strides("o", self.o, "batch", "token", "head"),
            "lse_batch": ahead[0] if ahead else 0,
            "lse_head": lse_head,
            "table_stride": 0 if self.page_table is None else self.page_table.stride(0),
            "HEADS": self.q.shape[-2],
            "KV_HEADS": self.k.shape[-2],
            "DIM": self.q.shape[-1],
            "WIDE": self.v.shape[-1],
        }


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a program holds: queries, heads of a group, padded widths, keys."""

    tokens: int
    heads: int
    key_width: int
    value_width: int
    keys: int
    warps: int
    stages: int
    joint: int = 1
    """KV heads of a program."""

    @property
    def few(self) -> bool:
        """Whether the rows fit into one tensor-core tile: mostly decode."""
        return self.tokens * self.joint * self.heads == 16


def tiles_of(task: Task) -> Tiles:
    """Tiles that fit a multiprocessor, with at most as many rows as the call has."""
    widths = [max(16, gpu.next_power_of_2(x.shape[-1])) for x in (task.k, task.v)]
    width, size = max(widths), task.dtype.itemsize
    lines = 128 if width <= 128 else 64
    if size == 4:
        lines = 32 if width <= 128 else 16
    group = gpu.next_power_of_2(task.group)
    heads = min(group, lines)
    tokens = max(1, min(lines // heads, gpu.next_power_of_2(max(1, task.max_seqlen_q))))
    tokens = max(tokens, 16 // heads)
    keys, stages = 64 if width <= 128 else 32, 3 if width <= 128 else 2
    if size == 4:
        keys, stages = 32 if width <= 128 else 16, 2
    elif tokens * heads == 16 and width <= 128:
        # A page-table lookup takes half of the stages, and 8-bit keys halve the bytes of each.
        stages = 3 if task.page_table is None and task.q.dtype.itemsize == 2 else 5
    held = tokens * heads * (widths[0] + (0 if task.qv is None else widths[1])) * size
    memory = min(TUNING.shared, gpu.max_shared_memory(task.q.device) - TUNING.spare)
    while held + stages * keys * sum(widths) * size > memory and stages * keys > 16:
        stages, keys = (stages - 1, keys) if stages > 1 else (1, keys // 2)
    warps = 8 if (tokens * heads > 64 and width > 64) or width > (256 if size == 2 else 64) else 4
    return Tiles(tokens, heads, widths[0], widths[1], keys, warps, stages)


def attend(task: Task) -> None:
    """Write o and lse of a task."""
    if task.q.numel() == 0 or task.batch == 0 or task.max_seqlen_q == 0:
        return
    tiles, keys, values = _paired(task, _joint(task, tiles_of(task)))
    q, k, v, o = task.q, task.k, task.v, task.o
    heads, kv_heads = q.shape[-2], k.shape[-2]
    columns = kv_heads // tiles.joint * -(-task.group // tiles.heads)
    count = -(-task.max_seqlen_q // tiles.tokens)
    splits = _splits(task, tiles, count * columns * task.batch)
    pdl = tiles.few and count == 1 and gpu.supports_pdl(q.device)
    part_o, part_lse, lines = o, None, q.shape[:-2].numel()
    if splits > 1:
        part_o = gpu.empty((lines, heads, splits, v.shape[-1]), torch.float32, o.device)
        part_lse = gpu.empty((lines, heads, splits), torch.float32, o.device)
    paging = _paging(task, tiles.keys)
    dtypes = {torch.float32: gpu.tl.float32, torch.float16: gpu.tl.float16}
    flash_kernel[(count * task.batch, columns, splits)](
        **gpu.select_arguments(flash_kernel, task.arguments()),
        **named_strides("k", k, "page", "slot", "head"),
        **named_strides("v", v, "page", "slot", "head"),
        keys=keys.blocks,
        values=values.blocks,
        o=part_o,
        part_lse=part_lse,
        tiles=count,
        splits=splits,
        k_lines=keys.page,
        k_head_lines=keys.head,
        k_column=keys.column,
        v_lines=values.page,
        v_head_lines=values.head,
        v_column=values.column,
        SIZE=k.shape[1] if paging else 1,
        PAGING=paging,
        TOKENS=tiles.tokens,
        HP=tiles.heads,
        JOINT=tiles.joint,
        DP=tiles.key_width,
        VP=tiles.value_width,
        KEYS=tiles.keys,
        CAPPED=task.softcap > 0,
        DTYPE=dtypes.get(task.dtype, gpu.tl.bfloat16),
        PRECISION="ieee" if task.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_option(pdl),
        **ATTENTION_TUNING.three_narrow if keys.blocks is not None and tiles.warps == 4 else {},
    )
    if part_lse is not None:
        padded = max(2, gpu.next_power_of_2(splits))
        block = merged_columns(padded, tiles.value_width)
        join_splits_kernel[(task.batch * task.max_seqlen_q, heads, tiles.value_width // block)](
            **gpu.select_arguments(join_splits_kernel, task.arguments()),
            part_o=part_o,
            part_lse=part_lse,
            o=o,
            longest=task.max_seqlen_q,
            splits=splits,
            BLOCK=block,
            SPLITS=padded,
            PDL=pdl,
            num_warps=4 if splits > 16 else 2,
            **pdl_option(pdl),
            **gpu.NO_FP_FUSION,
        )


def _joint(task: Task, tiles: Tiles) -> Tiles:
    """Tile over two adjacent narrow KV heads, if it has room for the rows of both: read separately,
    each would use only part of every memory sector."""
    heads = 2 * tiles.heads
    scaled = (task.q_descale, task.k_descale, task.v_descale)
    plain = task.qv is None and all(scale is None for scale in scaled)
    halves = task.k.dtype.itemsize == 2 or gpu.INTERPRETED
    narrow = max(tiles.key_width, tiles.value_width) <= TUNING.narrow
    beside = all(x.stride(-2) == x.shape[-1] for x in (task.k, task.v))
    room = tiles.few and heads <= 16 and task.max_seqlen_q <= 16 // heads
    if plain and halves and narrow and beside and room and task.k.shape[-2] % 2 == 0:
        return replace(tiles, tokens=16 // heads, joint=2)
    return tiles


def _paired(task: Task, tiles: Tiles) -> tuple[Tiles, Lines, Lines]:
    """k and v as tables of lines if tiles that are large enough can take keys in pairs of blocks,
    and the tiles for that."""
    single = task.dtype == torch.float32 and not gpu.INTERPRETED
    width = max(tiles.key_width, tiles.value_width)
    plain = task.qv is None and not task.softcap and task.scale > 0 and task.q_descale is None
    plain = plain and task.k_descale is None and _paging(task, tiles.keys) != 1
    alike = task.q.dtype == task.k.dtype == task.v.dtype == task.dtype
    lines = tiles.tokens * tiles.heads
    least = TUNING.paired if width <= TUNING.narrow else 2 * TUNING.paired
    if single or not plain or not alike or lines < least or width > 128:
        return tiles, NO_LINES, NO_LINES
    keys, values = lines_of(*caches(task), tiles.keys, flops_of(task))
    if keys.blocks is None:
        return tiles, NO_LINES, NO_LINES
    if width <= TUNING.narrow:
        # Small tiles: several programs per multiprocessor hide each other's latency.
        tiles = replace(
            tiles,
            tokens=max(1, TUNING.paired // tiles.heads),
            heads=min(TUNING.paired, tiles.heads),
        )
    return replace(tiles, stages=2), keys, values


def caches(task: Task) -> tuple[Tensor, Tensor]:
    """k and v: [pages, slots, heads, d]."""
    k, v = (x if x.dim() == 4 else x.unsqueeze(0) for x in (task.k, task.v))
    return k, v


def flops_of(task: Task) -> float:
    """Operations of a task whose queries see half of the keys."""
    pairs = task.q.shape[:-2].numel() * task.longest / 2
    return 2 * pairs * task.q.shape[-2] * (task.k.shape[-1] + task.v.shape[-1])


def _splits(task: Task, tiles: Tiles, programs: int) -> int:
    """Number of splits of the keys."""
    most = max(1, min(-(-task.longest // tiles.keys) // 2, TUNING.max_splits))
    if not tiles.few:
        return min(-(-TUNING.programs // programs), most)
    width = tiles.key_width * tiles.joint
    light = width > TUNING.narrow and (tiles.keys < 64 or task.q.dtype.itemsize == 1)
    wave = TUNING.light_programs if light else reading_wave(task.q.device, width)
    return whole_waves(programs, wave, most)


def _paging(task: Task, keys: int) -> int:
    """As the kernel's PAGING."""
    if task.page_table is None:
        return 0
    return 2 if task.leftpad is None and task.k.shape[1] % keys == 0 else 1
