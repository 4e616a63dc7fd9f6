"""Launch of latent attention over records of the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.launch import whole_waves
from cairn.ops.launch_cache.plans import is_traced
from cairn.ops.pdl import pdl_option
from cairn.ops.sparse_mla import records
from cairn.ops.sparse_mla.kernels.attend import accumulate_kernel, merge_kernel
from cairn.ops.sparse_mla.kernels.groups import cells_groups_kernel
from cairn.ops.sparse_mla.tuning import TUNING

MAX_LATENT = 512
GROUP_HEADS = 64
"""Heads per program of `cells_groups_kernel`, and candidates per block."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The cache records (candidates) that each token attends to.

    Attributes:
        end: [T], end of each token's range of candidates.
        most: upper bound of `end`.
        cells: [T, W] int32: a candidate is an index into a token's list of cells; None: it is a
            slot of the token's row.
        table, row: page table, and each token's row in it; used where `cells` is None.
        begin: [T], first candidate of each token; None: 0.
        extra, extra_cache: further candidates, appended to these, in another cache; see
            `side_by_side`.
    """

    end: Tensor
    most: int
    cells: Tensor | None = None
    table: Tensor | None = None
    row: Tensor | None = None
    begin: Tensor | None = None
    extra: Candidates | None = None
    extra_cache: Tensor | None = None


def accepts(q: Tensor, cache: Tensor, latent: int) -> bool:
    """Whether the kernel can read these queries and records."""
    rope, quantized = q.shape[2] - latent, records.is_quantized(cache)
    if latent > MAX_LATENT or q.stride(2) != 1:
        return False
    if not quantized:
        return True
    if not rope and records.whole_latent(latent, cache.shape[2]) is None:
        return False
    even = rope % 2 == 0 and all(n % 4 == 0 for n in (*cache.stride()[:2], cache.storage_offset()))
    return even and (gpu.INTERPRETED or gpu.supports_e4m3(q.device))


def is_flat(cache: Tensor) -> bool:
    """Whether all records of a cache have one stride, across pages too."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def side_by_side(cache: Tensor, other: Tensor) -> bool:
    """Whether one kernel can read records of both caches: both have the same stride between records
    and are aligned to 16 bytes."""
    even = is_traced(cache) or all(x.data_ptr() % 16 == 0 for x in (cache, other))
    return even and is_flat(cache) and is_flat(other) and cache.stride(1) == other.stride(1)


def _tiles(latent: int, quantized: bool) -> tuple[int, int]:
    """Tiles that a latent is held in (a power of two), and the width of each."""
    if not quantized and latent % (4 * records.TILE):
        return 1, max(16, gpu.next_power_of_2(latent))
    return gpu.next_power_of_2(-(-latent // records.TILE)), records.TILE


def _views(
    cache: Tensor, quantized: bool, plain: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Views of a cache: as stored, as its float32 scales and as its bfloat16 rotary keys."""
    if not quantized:
        return cache, None, None
    if plain:
        return cache, None, cache.view(torch.bfloat16)
    return cache, cache.view(torch.float32), cache.view(torch.bfloat16)


def _splits(tokens: int, columns: int, blocks: int, few: bool) -> int:
    """Splits per token (split-KV), so that few tokens fill the device too."""
    programs = TUNING.few_programs if few else TUNING.programs
    return max(1, min(programs // max(1, tokens * columns), blocks))


def attend(
    q: Tensor,
    cache: Tensor,
    candidates: Candidates,
    scale: float,
    latent: int,
    sink: Tensor | None,
    dtype: torch.dtype,
    with_peaks: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o [T, H, latent] of `dtype`, lse [T, H] float32, and (with_peaks) the largest logits in base
    2, [T, H] float32; see `accumulate_kernel`."""
    (tokens, heads, width), device = q.shape, q.device
    quantized, single = records.is_quantized(cache), q.dtype == torch.float32
    o = gpu.empty((tokens, heads, latent), dtype, device)
    lse = gpu.empty((tokens, heads), torch.float32, device)
    peaks = gpu.empty((tokens, heads), torch.float32, device) if with_peaks else None
    if not tokens:
        return o, lse, peaks
    if not with_peaks and sink is None and fits_groups(q, cache, candidates, latent):
        _attend_in_groups(q, cache, candidates, scale, o, lse)
        return o, lse, None
    pages, size = cache.shape[:2]
    lines = 16 if single else min(TUNING.heads, max(16, gpu.next_power_of_2(heads)))
    keys = TUNING.single_keys if single else TUNING.keys
    columns = -(-heads // lines)
    second = _second(candidates)
    blocks = -(-max(1, candidates.most + second["extra_most"]) // keys)
    splits = 1 if with_peaks else _splits(tokens, columns, blocks, lines < TUNING.heads)
    part_o, part_lse = o, lse
    if splits > 1:
        part_o = gpu.empty((tokens, heads, splits, latent), torch.float32, device)
        part_lse = gpu.empty((tokens, heads, splits), torch.float32, device)
    tiles, wide = _tiles(latent, quantized)
    plain = (quantized and width == latent and records.whole_latent(latent, cache.shape[2])) or 0
    values, scales, ropes = _views(cache, quantized, plain)
    source = candidates.cells if candidates.table is None else candidates.table
    paged = candidates.cells is None
    assert source is not None
    accumulate_kernel[(tokens * columns, splits)](
        q,
        cache=values,
        scales=scales,
        ropes=ropes,
        cells=candidates.cells,
        table=candidates.table,
        rows=candidates.row,
        begins=candidates.begin,
        ends=candidates.end,
        sink=sink if splits == 1 else None,
        o=part_o,
        lse=part_lse,
        peaks=peaks,
        most=candidates.most,
        capacity=pages if paged else pages * size,
        **second,
        scale=scale,
        q_token=q.stride(0),
        q_head=q.stride(1),
        page_stride=cache.stride(0),
        slot_stride=cache.stride(1),
        source_stride=source.stride(0),
        HEADS=heads,
        LINES=lines,
        LATENT=latent,
        PLAIN=plain,
        ROPE=width - latent,
        WIDTH=wide,
        RP=max(16, gpu.next_power_of_2(width - latent)),
        TILES=tiles,
        SIZE=0 if not paged and is_flat(cache) else size,
        KEYS=keys,
        PAGED=paged,
        PRECISION="ieee" if single else "tf32",
        num_warps=4 if lines < TUNING.heads else 8,
        num_stages=TUNING.stages,
    )
    if splits > 1:
        _merge(part_o, part_lse, sink, o, lse)
    return o, lse, peaks


def _second(candidates: Candidates) -> dict[str, Any]:
    """Arguments of `accumulate_kernel` for a second list of candidates."""
    extra, cache = candidates.extra, candidates.extra_cache
    return {
        "extra_cache": cache,
        "extra_cells": None if extra is None else extra.cells,
        "extra_ends": None if extra is None else extra.end,
        "extra_most": 0 if extra is None else extra.most,
        "extra_capacity": 0 if cache is None else cache.shape[0] * cache.shape[1],
    }


def fits_groups(q: Tensor, cache: Tensor, candidates: Candidates, latent: int) -> bool:
    """Whether `cells_groups_kernel` applies: Hopper, 512 + 64 elements per record, lists of
    cells."""
    if candidates.cells is None or candidates.extra or (latent, q.shape[2]) != (512, 576):
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or records.is_quantized(cache):
        return False
    aligned = cache.stride(1) * cache.element_size() % 16 == 0 and cache.data_ptr() % 16 == 0
    return (
        gpu.gl is not None
        and is_flat(cache)
        and aligned
        and q.shape[1] >= TUNING.group_heads
        and len(q) * -(-q.shape[1] // GROUP_HEADS) >= TUNING.group_programs
        and gpu.supports_wgmma(q.device)
    )


def _attend_in_groups(
    q: Tensor, cache: Tensor, candidates: Candidates, scale: float, o: Tensor, lse: Tensor
) -> None:
    """Write o and lse; see `cells_groups_kernel`."""
    (tokens, heads, _), cells = q.shape, candidates.cells
    assert cells is not None
    columns = -(-heads // GROUP_HEADS)
    most = max(1, candidates.most // (4 * GROUP_HEADS))
    splits = whole_waves(columns * tokens, gpu.sm_count(q.device), most)
    part_o, part_lse = o, lse
    if splits > 1:
        part_o = gpu.empty((tokens, heads, splits, o.shape[2]), torch.float32, q.device)
        part_lse = gpu.empty((tokens, heads, splits), torch.float32, q.device)
    cells_groups_kernel[(tokens * columns, splits)](
        q=q,
        cache=cache,
        cells=cells,
        lengths=candidates.end,
        o=part_o,
        lse=part_lse,
        most=candidates.most,
        capacity=cache.shape[0] * cache.shape[1],
        scale=scale,
        q_token=q.stride(0),
        q_head=q.stride(1),
        slot_stride=cache.stride(1),
        cells_stride=cells.stride(0),
        HEADS=heads,
        num_warps=4,
    )
    if splits > 1:
        _merge(part_o, part_lse, None, o, lse)


def _merge(part_o: Tensor, part_lse: Tensor, sink: Tensor | None, o: Tensor, lse: Tensor) -> None:
    """Merge the partial states [T, H, splits, .] into o and lse."""
    tokens, heads, splits, latent = part_o.shape
    padded, pdl = gpu.next_power_of_2(splits), gpu.supports_pdl(o.device)
    columns = max(16, min(gpu.next_power_of_2(latent), TUNING.merged // padded))
    merge_kernel[(tokens * heads, -(-latent // columns))](
        part_o,
        part_lse,
        sink,
        o,
        lse,
        splits,
        HEADS=heads,
        LATENT=latent,
        COLUMNS=columns,
        SPLITS=padded,
        PDL=pdl,
        num_warps=2,
        **pdl_option(pdl),
        **gpu.NO_FP_FUSION,
    )
