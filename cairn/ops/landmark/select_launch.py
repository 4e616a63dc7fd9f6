"""Launch of select_pages on a GPU, which depends on the number of tokens, never on their
candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.launch import whole_waves
from cairn.ops.landmark.kernels import choose as choosers
from cairn.ops.landmark.kernels import select as kernels
from cairn.ops.landmark.kernels.scores import group_scores_kernel
from cairn.ops.landmark.tuning import TUNING

MAX_TOKENS = gpu.MAX_GRID_YZ // 16 * 16
"""Most tokens per launch."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A call of select_pages on a GPU.

    Attributes:
        lmk_q, summary_key, summary_bias, lse, row, slot, page_table: as in the op.
        page_size, topk, scale: as in the op, with an explicit scale.
        offset: a slot's candidates are max(slot - offset, 0) // page_size.
        groups: KV heads.
        normalised: whether each head's normaliser is subtracted from its scores.
    """

    lmk_q: Tensor
    summary_key: Tensor
    summary_bias: Tensor | None
    lse: Tensor
    row: Tensor
    slot: Tensor
    page_table: Tensor
    page_size: int
    topk: int
    scale: float
    offset: int
    groups: int
    normalised: bool

    def part(self, at: slice) -> Selection:
        """The call restricted to some tokens."""
        return Selection(
            self.lmk_q[at],
            self.summary_key,
            self.summary_bias,
            self.lse[at],
            self.row[at],
            self.slot[at],
            self.page_table,
            self.page_size,
            self.topk,
            self.scale,
            self.offset,
            self.groups,
            self.normalised,
        )

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.lmk_q.shape[1]

    @property
    def pages(self) -> int:
        """Most candidates that a token can have."""
        return self.page_table.shape[1]

    @property
    def width(self) -> int:
        """Width of a tile."""
        return max(16, gpu.next_power_of_2(self.lmk_q.shape[2]))

    @property
    def group(self) -> int:
        """Query heads per KV head, padded."""
        return gpu.next_power_of_2(self.heads // self.groups)

    @property
    def block(self) -> int:
        """Candidates per block, of which the maximum is stored."""
        return block_of(self.pages)

    @property
    def blocks(self) -> int:
        """Blocks per row."""
        return -(-self.pages // self.block)

    @property
    def bias(self) -> Tensor:
        """summary_bias, or a dummy tensor that is not read."""
        return self.lse if self.summary_bias is None else self.summary_bias

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory on the device."""
        return gpu.empty(shape, dtype, self.lmk_q.device)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments shared by the scoring kernels."""
        return {
            "lmk_q": self.lmk_q,
            "key": self.summary_key,
            "bias": self.bias,
            "lse": self.lse,
            "slot": self.slot,
            "row": self.row,
            "page_table": self.page_table,
            "offset": self.offset,
            "size": self.page_size,
            "scale": self.scale,
            "table_stride": self.page_table.stride(0),
            "page_stride": self.summary_key.stride(0),
            "head_stride": self.summary_key.stride(1),
            "pages": self.pages,
            "blocks": self.blocks,
            "topk": self.topk,
            "HEADS": self.heads,
            "KV_HEADS": self.groups,
            "KEY_HEADS": self.summary_key.shape[1],
            "DIM": self.lmk_q.shape[2],
            "GP": self.group,
            "DP": self.width,
            "CB": self.block,
            "BIAS": self.summary_bias is not None,
            "NORMALISED": self.normalised,
            "PRECISION": "ieee" if self.lmk_q.dtype == torch.float32 else "tf32",
        }


def block_of(pages: int) -> int:
    """Candidates per block, for rows of `pages` pages."""
    return 16 if pages <= 1 << 14 else 64


def accepts(lmk_q: Tensor, summary_key: Tensor, page_table: Tensor, groups: int, topk: int) -> bool:
    """Whether the kernels support these shapes."""
    heads, dim = lmk_q.shape[1:]
    return (
        lmk_q.is_contiguous()
        and lmk_q.dtype == summary_key.dtype
        and summary_key.stride(2) == 1
        # Storage is head-major (a head's keys of all pages, then the next head's), and kernels
        # compute offsets in it in 32 bits.
        and summary_key.stride(1) * summary_key.shape[1] < 1 << 31
        and heads % summary_key.shape[1] == 0
        and 16 <= dim <= 256
        and topk > 0
        and _holds(page_table.shape[1], heads, groups, topk)
    )


def most_pages(heads: int, groups: int, topk: int) -> int:
    """Most pages of a row that the kernels select from, by so many heads in so many groups."""
    pages = 1
    while _holds(2 * pages, heads, groups, topk):
        pages *= 2
    return pages


def _holds(pages: int, heads: int, groups: int, topk: int) -> bool:
    """Whether a program can hold the maxima of all blocks, and the blocks that it selects from."""
    block = block_of(pages)
    blocks = gpu.next_power_of_2(-(-pages // block))
    group = gpu.next_power_of_2(-(-heads // groups))
    chosen = min(gpu.next_power_of_2(topk), blocks)
    return max(blocks, chosen * block) * group <= TUNING.select_max_numbers


def select(job: Selection, *, few: bool) -> tuple[Tensor, Tensor]:
    """indices [T, h_kv, topk] int32 and scores [T, h_q, topk] float32, as the op defines them.

    Args:
        few: read the summaries once and store every head's scores; otherwise read them twice and
            store only the best of each group.
    """
    tokens = job.slot.numel()
    indices = job.empty(tokens, job.groups, job.topk, dtype=torch.int32)
    scores = job.empty(tokens, job.heads, job.topk)
    lines = job.heads if few else job.groups
    rounds = -(-tokens * 4 * lines * job.pages // TUNING.select_workspace_bytes)
    # Multiples of 16 keep slices aligned like the whole tensor, so that no kernel is compiled
    # again; whole tiles of tokens leave no part of a program idle.
    each = max(1, -(-tokens // max(1, rounds)))
    unit = 16 if few or each <= TUNING.select_tokens else TUNING.select_tokens
    step = min(MAX_TOKENS, -(-each // unit) * unit)
    # Normalisers take no workspace: of all tokens at once they fill a device.
    total = _normalisers(job) if job.normalised and not few else None
    for begin in range(0, tokens, step):
        at = slice(begin, begin + step)
        part = job.part(at) if tokens > step else job
        if few:
            _select_few(part, indices[at], scores[at])
        else:
            _select_many(part, None if total is None else total[:, at], indices[at], scores[at])
    return indices, scores


def _select_few(job: Selection, indices: Tensor, scores: Tensor) -> None:
    tokens, heads = job.slot.numel(), job.heads
    u = job.empty(tokens, job.pages, heads)
    part_best, part_sum = (job.empty(tokens, job.blocks, heads) for _ in range(2))
    tile = max(job.block, TUNING.select_tile_numbers // (job.group * job.width))
    wanted = max(TUNING.select_min_programs, -(-TUNING.select_programs // (tokens * job.groups)))
    programs = max(1, min(-(-job.pages // tile), wanted))
    arguments = job.arguments() | {"u": u, "part_best": part_best, "part_sum": part_sum}
    kernels.score_kernel[(programs, job.groups, tokens)](
        **gpu.select_arguments(kernels.score_kernel, arguments), TILE=tile, num_warps=4
    )
    choosers.choose_kernel[(job.groups, tokens)](
        **gpu.select_arguments(choosers.choose_kernel, arguments | _choosing(job)),
        indices=indices,
        scores=scores,
        num_warps=4,
    )


def _choosing(job: Selection) -> dict[str, int]:
    """K, KB and BLOCKS of the selecting kernels."""
    width, blocks = gpu.next_power_of_2(job.topk), gpu.next_power_of_2(job.blocks)
    return {"K": width, "KB": min(width, blocks), "BLOCKS": blocks}


def _select_many(job: Selection, total: Tensor | None, indices: Tensor, scores: Tensor) -> None:
    """total: [h_q, T] float32, any stride of rows, what `_normalisers` gives; None: not needed."""
    tokens, heads, _ = job.lmk_q.shape
    # Rows are padded to multiples of 32: stores to unaligned rows would not be vectorised.
    line = -(-job.pages // 32) * 32
    blocks = -(-line // job.block // 16) * 16
    best, tops = job.empty(tokens, job.groups, line), job.empty(tokens, job.groups, blocks)
    (_score_in_groups if in_groups(job) else _score_groups)(job, total, best, tops)
    # With one head a group, the best score of the group is that head's score u.
    alone = heads == job.groups
    shape = _choosing(job)
    few = min(TUNING.select_listed * shape["K"], shape["KB"] * job.block)
    arguments = job.arguments() | shape | {"pages": line, "blocks": blocks}
    choosers.choose_best_kernel[(job.groups, tokens)](
        **gpu.select_arguments(choosers.choose_best_kernel, arguments),
        score=best,
        tops=tops,
        listed=job.empty(tokens, job.groups, few, dtype=torch.int32),
        listed_score=job.empty(tokens, job.groups, few),
        indices=indices,
        scores=scores,
        LEVELS=max(1, (shape["BLOCKS"] // TUNING.select_min_blocks).bit_length()),
        FEW=few,
        SCORED=alone,
        **(
            {"num_warps": 1, "maxnreg": TUNING.select_registers}
            if blocks <= TUNING.select_a_warp
            else {"num_warps": 2}
        ),
    )
    if alone:
        return
    step = max(1, TUNING.select_tile_numbers // (job.group * job.width))
    kernels.rescore_kernel[(tokens, job.groups)](
        **gpu.select_arguments(kernels.rescore_kernel, arguments),
        indices=indices,
        scores=scores,
        STEP=min(step, gpu.next_power_of_2(job.topk)),
        num_warps=2,
    )


def _normalisers(job: Selection) -> Tensor:
    """The normalisers (log-sum-exp) subtracted from each head's scores: [h_q, T] float32."""
    tokens, heads, _ = job.lmk_q.shape
    half = job.lmk_q.dtype != torch.float32
    rows = (128 if half else 64) if job.width <= 128 else 32
    ahead = 2 if not half else 5 if job.width <= 64 else 3
    total = job.empty(heads, tokens)
    kernels.normaliser_kernel[(heads, -(-tokens // rows))](
        **gpu.select_arguments(kernels.normaliser_kernel, job.arguments()),
        total=total,
        tokens=tokens,
        TOKENS=rows,
        BLOCK=max(rows, 64),
        STAGES=ahead,
        num_warps=4,
        num_stages=ahead,
    )
    return total


def in_groups(job: Selection) -> bool:
    """Whether the wgmma kernel scores the pages of many tokens."""
    key, (tokens, heads, dim) = job.summary_key, job.lmk_q.shape
    group = heads // job.groups
    addresses = (job.lmk_q.data_ptr(), key.data_ptr(), *key.stride()[:2])
    return (
        gpu.supports_wgmma(key.device)
        and key.dtype.itemsize == 2
        and job.group == group <= TUNING.select_max_heads.get(dim, 0)
        and job.pages >= TUNING.select_min_pages * group
        and tokens >= TUNING.select_tokens
        and TUNING.select_min_scale <= abs(job.scale) < math.inf
        and all(n % 16 == 0 for n in addresses)
    )


def _score_in_groups(job: Selection, total: Tensor | None, best: Tensor, tops: Tensor) -> None:
    tokens = job.slot.numel()
    tiles = -(-tokens // TUNING.select_tokens)
    # One program uses all shared memory of a multiprocessor.
    wave, most = gpu.sm_count(best.device), -(-job.pages // TUNING.select_tile)
    programs = whole_waves(tiles * job.groups, wave, most)
    group_scores_kernel[(programs, job.groups, tiles)](
        **gpu.select_arguments(group_scores_kernel, _group_arguments(job, total, best, tops)),
        BLOCK=TUNING.select_tile,
        STAGES=TUNING.select_stages,
        num_warps=4,
    )


def _group_arguments(
    job: Selection, total: Tensor | None, best: Tensor, tops: Tensor
) -> dict[str, Any]:
    """Keyword arguments shared by both kernels that score groups of heads."""
    return job.arguments() | {
        "total": job.lse if total is None else total,
        "total_stride": 0 if total is None else total.stride(0),
        "score": best,
        "part_best": tops,
        "tokens": job.slot.numel(),
        "pages": best.shape[2],
        "blocks": tops.shape[2],
    }


def _score_groups(job: Selection, total: Tensor | None, best: Tensor, tops: Tensor) -> None:
    tokens = job.slot.numel()
    half = job.lmk_q.dtype != torch.float32
    large = half and job.width <= 128 and (job.width > 64 or job.pages > TUNING.select_many_pages)
    rows = 32 if job.width > 128 else 128 if half and not large else 64
    columns = 128 if large else min(rows, 64)
    stages = 3 if half else 2
    tiles = -(-tokens // rows)
    wanted = 2 * TUNING.select_programs if large else TUNING.select_programs
    programs = max(1, min(-(-job.pages // columns), -(-wanted // (tiles * job.groups))))
    kernels.group_kernel[(programs, job.groups, tiles)](
        **gpu.select_arguments(kernels.group_kernel, _group_arguments(job, total, best, tops)),
        TOKENS=rows,
        BLOCK=columns,
        STAGES=stages,
        num_warps=4,
        num_stages=stages,
    )
