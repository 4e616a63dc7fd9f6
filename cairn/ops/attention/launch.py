"""Launch of dense and window attention, which depends on the number of tokens, and on the lengths
of rows only if the host passes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.kernels import split_kernel, tile_kernel
from cairn.ops.attention.merge_kernels import merge_kernel
from cairn.ops.attention.tma import NO_LINES, Lines, lines_of
from cairn.ops.attention.tuning import TUNING
from cairn.ops.cache import quantized
from cairn.ops.pdl import pdl_option

SPLIT_TOKENS = 640
"""Up to this many tokens are run by one program per token, KV head and split: the rows of a decode
step, with their landmarks."""
CHUNK_TOKENS = 256
"""The same for tokens of prefill chunks."""
CHUNK_LINES = 512
"""Fewest tokens of prefill chunks, times KV heads, for tiles. Measured on an H100: with 16 heads
that share 2 tiles are faster from 128 to 256 tokens on, with 32 that share none from 8 to 16 on."""
LANDMARK_LINES = 256
"""The same for layers that select pages. With 16 heads that share 2, whole steps of 128 to 224
slots without a past take 4 to 20% less in tiles, behind 8K to 32K about as long."""
DENSE_LINES = 128
"""The same for dense attention with lengths known on the host, where keys of tiles are split. After
8K slots and with 2 heads, 64 tokens are three times as fast in tiles, and 16 tokens equally
fast."""


def accepts(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the kernels support these tensors: plain layouts, and heads of 16 to 256 elements."""
    heads, kv_heads, dim = q.shape[1], k_cache.shape[1], q.shape[2]
    return (
        q.is_contiguous()
        and k_cache.dtype == v_cache.dtype
        and k_cache.stride() == v_cache.stride()
        and quantized.fits(q, k_cache)
        and 16 <= dim <= 256
        and heads // kv_heads <= 16
    )


def in_tiles(q: Tensor, kv_heads: int, chunked: bool, lines: int = CHUNK_LINES) -> bool:
    """Whether queries run in tiles of consecutive tokens; otherwise one program per token."""
    tokens = q.shape[0]
    if chunked:
        return tokens > CHUNK_TOKENS or tokens * kv_heads >= lines
    return tokens > SPLIT_TOKENS


def dense_in_tiles(q: Tensor, kv_heads: int, chunked: bool, segments: Sequence[int] | None) -> bool:
    """`in_tiles` for dense attention; segments: as in `dense_attention`."""
    return in_tiles(q, kv_heads, chunked, CHUNK_LINES if segments is None else DENSE_LINES)


@dataclass(frozen=True, slots=True)
class Task:
    """Attention of every token over its last slots, as the ops define it.

    Attributes:
        q, k_cache, v_cache, row, slot, page_table: as in the ops.
        window: visible slots; 0: all.
        scale: softmax scale; None: d ** -0.5.
        aligned: whether the window starts at a page border.
        mask_landmarks: whether the last slot of every page is masked.
        segments: as in `dense_attention`.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    row: Tensor
    slot: Tensor
    page_table: Tensor
    window: int = 0
    scale: float | None = None
    aligned: bool = False
    mask_landmarks: bool = False
    segments: Sequence[int] | None = None

    @property
    def width(self) -> int:
        """Width of a tile."""
        return max(16, gpu.next_power_of_2(self.q.shape[2]))

    @property
    def group(self) -> int:
        """Query heads per KV head, padded."""
        return gpu.next_power_of_2(self.q.shape[1] // self.k_cache.shape[1])

    @property
    def keys(self) -> int:
        """Keys per tile."""
        return 64 if self.width <= 128 else 32

    @property
    def stages(self) -> int:
        """num_stages of the loop of `split_kernel`."""
        return TUNING.stages if self.q.dtype != torch.float32 and self.width <= 128 else 2

    @property
    def wave(self) -> int:
        """Programs of `split_kernel` per wave on a large device."""
        # Pipeline stages of a quantized cache hold fewer bytes.
        if self.stages < TUNING.stages or self.k_cache.dtype != self.q.dtype:
            return TUNING.light_wave if self.width <= 64 else TUNING.wide_light_wave
        return reading_wave(self.q.device, self.width)

    @property
    def longest(self) -> int:
        """Most slots visible to a token."""
        size = self.k_cache.shape[2]
        most = self.page_table.shape[1] * size
        return min(self.window + size, most) if self.window else most

    @property
    def blocks(self) -> int:
        """Most blocks of keys of a token."""
        return -(-self.longest // self.keys) + 1

    @property
    def known_blocks(self) -> int:
        """Blocks of keys of the longest row, if the host knows it."""
        assert self.segments is not None
        known = zip(self.segments[1::3], self.segments[2::3], strict=True)
        return max(-(-(first + count) // self.keys) for first, count in known)

    def empty(self, *splits: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Uninitialised o [T, h_q, *splits, d] of `dtype` and lse [T, h_q, *splits] float32."""
        tokens, heads, dim = self.q.shape
        shape = (tokens, heads, *splits)
        o = gpu.empty((*shape, dim), dtype, self.q.device)
        return o, gpu.empty(shape, torch.float32, self.q.device)

    @property
    def pairs(self) -> float:
        """Approximate number of (token, visible slot) pairs."""
        if self.segments is None:
            return self.q.shape[0] ** 2 / 2
        known = zip(self.segments[1::3], self.segments[2::3], strict=True)
        return sum(count * (first + count / 2) for first, count in known)

    def lines(self) -> tuple[Lines, Lines]:
        """TMA tables of the caches, if tiles can load keys through them."""
        factor = 1.0 if self.scale is None else self.scale
        plain = not self.window and not self.mask_landmarks and factor > 0
        fitting = self.width <= 128 and self.k_cache.shape[2] % self.keys == 0
        single = self.q.dtype == torch.float32 and not gpu.INTERPRETED
        if not plain or not fitting or single or self.k_cache.dtype != self.q.dtype:
            return NO_LINES, NO_LINES
        flops = 4 * self.pairs * self.q.shape[1] * self.q.shape[2]
        caches = (self.k_cache.transpose(1, 2), self.v_cache.transpose(1, 2))
        return lines_of(*caches, self.keys, flops)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments shared by the kernels of a task."""
        (_, heads, dim), (_, kv_heads, size, _) = self.q.shape, self.k_cache.shape
        return {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "row": self.row,
            "slot": self.slot,
            "page_table": self.page_table,
            "window": self.window,
            "scale": dim**-0.5 if self.scale is None else self.scale,
            "table_stride": self.page_table.stride(0),
            "page_stride": self.k_cache.stride(0),
            "head_stride": self.k_cache.stride(1),
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "SIZE": size,
            "DP": self.width,
            "KEYS": self.keys,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
        }


def attend_tiles(task: Task, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Tiles of consecutive tokens: for prefill. o [T, h_q, d] of a dtype, lse [T, h_q] float32."""
    o, lse = task.empty(dtype=dtype)
    tokens = task.q.shape[0]
    if tokens == 0:
        return o, lse
    keys, values = task.lines()
    rows, options = tile(task, keys.blocks is not None)
    per_tile = max(1, rows // task.group)
    tiles, kv_heads = -(-tokens // per_tile), task.k_cache.shape[1]
    splits = _tile_splits(task, tiles * kv_heads)
    part_o, part_lse = (o, lse) if splits == 1 else task.empty(splits)
    tile_kernel[(kv_heads, tiles, splits)](
        **task.arguments(),
        keys=keys.blocks,
        values=values.blocks,
        o=part_o,
        lse=part_lse,
        tokens=tokens,
        page_lines=keys.page,
        head_lines=keys.head,
        head_column=keys.column,
        TOKENS=per_tile,
        GP=task.group,
        ALIGNED=task.aligned,
        MASKED=task.mask_landmarks,
        LEAST=TUNING.tile_blocks if splits > 1 else 0,
        **options,
    )
    if splits > 1:
        merge(part_o, part_lse, o, lse, pdl=gpu.supports_pdl(task.q.device))
    return o, lse


def _tile_splits(task: Task, programs: int) -> int:
    """Splits of the keys (split-KV) for `programs` tiles, so that few tiles fill the device; 1 if
    the host does not know the lengths, because rows may be short and splits need a merge."""
    if task.window or task.segments is None:
        return 1
    most = max(1, min(TUNING.max_tile_splits, TUNING.tile_waves[task.width > 64] // programs))
    blocks = task.known_blocks
    merged = 8 * task.q.numel() / TUNING.merge_rate

    def seconds(splits: int) -> float:
        own = max(TUNING.tile_blocks, blocks / splits) * TUNING.block_seconds
        return own if splits == 1 else own + TUNING.merge_seconds + splits * merged

    return min(range(1, most + 1), key=seconds)


def tile(task: Task, paired: bool = False) -> tuple[int, dict[str, int]]:
    """Query rows of a tile, and its launch options; paired: keys are processed in pairs of
    blocks."""
    half, narrow, wide = task.q.dtype != torch.float32, task.width <= 64, task.width > 128
    rows = 32 if wide else 64
    if paired and narrow:
        return rows, {"num_warps": 4, "num_stages": 2, **TUNING.three_narrow}
    # A window spans few key blocks, too few to pipeline: with heads of 128, two small programs per
    # multiprocessor hide each other's latency.
    if not half or (task.window and task.width == 128):
        return rows, {"num_warps": 4, "num_stages": 2}
    stages = 2 if wide or paired else 3
    return 2 * rows, {"num_warps": 4 if narrow else 8, "num_stages": stages}


def splits_of(task: Task, programs: int = 0) -> int:
    """Splits per token for about `programs` programs in all; 0: as many as fill a large device."""
    programs = programs or TUNING.programs
    lines = task.q.shape[0] * task.k_cache.shape[1]
    return max(1, min(task.blocks, -(-programs // lines), TUNING.max_splits))


def _splits(task: Task) -> int:
    """Splits of a dense decode launch, in whole waves of programs."""
    if task.window:
        return splits_of(task)
    lines = task.q.shape[0] * task.k_cache.shape[1]
    return whole_waves(lines, task.wave, min(task.blocks, TUNING.max_splits))


def reading_wave(device: torch.device, width: int) -> int:
    """Number of programs that read a large device's memory fastest, for heads of `width` 16-bit
    elements, each with two pairs of blocks of 64 keys and values in flight."""
    on_way = TUNING.multiprocessors * 2 * 2 * 64 * max(64, width) * 2
    return TUNING.multiprocessors * math.ceil(TUNING.latency * gpu.memory_rate(device) / on_way)


def whole_waves(lines: int, wave: int, most: int) -> int:
    """Splits per line, at most `most`, that fill waves of programs best."""

    def fill(splits: int) -> float:
        programs = splits * lines
        return min(TUNING.full, programs / (-(-programs // wave) * wave))

    return max(
        (max(1, min(n * wave // lines, most)) for n in range(1, TUNING.max_waves + 1)), key=fill
    )


def attend_splits(task: Task, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """One program per token, KV head and split, for decode; same results as `attend_tiles`."""
    o, lse = task.empty(dtype=dtype)
    if task.q.shape[0] == 0:
        return o, lse
    splits, pdl = _splits(task), gpu.supports_pdl(task.q.device)
    part_o, part_lse = (o, lse) if splits == 1 else task.empty(splits)
    split_kernel[(splits, task.k_cache.shape[1], task.q.shape[0])](
        **task.arguments(),
        o=part_o,
        lse=part_lse,
        parts=splits,
        GP=max(16, task.group),
        ALIGNED=task.aligned,
        MASKED=task.mask_landmarks,
        PDL=pdl,
        num_warps=4,
        num_stages=task.stages,
        **pdl_option(pdl),
    )
    if splits > 1:
        merge(part_o, part_lse, o, lse, pdl=pdl)
    return o, lse


def merged_columns(splits: int, width: int) -> int:
    """Columns (a power of two, of `width`) of a result that one program merges from `splits`
    splits."""
    return max(16, min(width, TUNING.merged // splits))


def merge(
    part_o: Tensor,
    part_lse: Tensor,
    o: Tensor,
    lse: Tensor | None,
    *,
    softmax1: bool = False,
    pdl: bool = False,
) -> None:
    """Write o [T, h_q, d], and lse [T, h_q] if given: the splits' states merged.

    Args:
        part_o: [T, h_q, splits, d] float32; part_lse: [T, h_q, splits] float32.
        softmax1: an additional state with o = 0 and lse = 0 is merged into o.
        early: launch with programmatic dependent launch.
    """
    tokens, heads, splits, dim = part_o.shape
    padded = gpu.next_power_of_2(splits)
    columns = merged_columns(padded, gpu.next_power_of_2(dim))
    merge_kernel[(tokens * heads, -(-dim // columns))](
        part_o=part_o,
        part_lse=part_lse,
        o=o,
        lse=lse,
        splits=splits,
        DIM=dim,
        DP=columns,
        SPLITS=padded,
        SOFTMAX1=softmax1,
        PDL=pdl,
        num_warps=4 if padded * columns > 4096 else 2,
        **pdl_option(pdl),
        **gpu.NO_FP_FUSION,
    )
