"""How select_pages is launched on a GPU: by the number of tokens, never by their candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.launch import whole_waves
from cairn.ops.landmark.kernels import choose as choosers
from cairn.ops.landmark.kernels import select as kernels
from cairn.ops.landmark.kernels.scores import group_scores_kernel
from cairn.ops.landmark.tuning import TUNING

MOST_TOKENS = gpu.MOST_PROGRAMS // 16 * 16
"""As many at most."""


@dataclass(frozen=True, slots=True)
class Selection:
    """One call of select_pages, on the device.

    Attributes:
        lmk_q, summary_key, summary_bias, lse, row, slot, page_table: as in the op.
        page_size, topk, scale: as in the op, the scale given.
        offset: a slot's candidates are max(slot - offset, 0) // page_size.
        groups: KV heads.
        normalised: scores are compared less each head's normaliser.
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
        """The same for some of the tokens."""
        return Selection(
            self.lmk_q[at],
            self.summary_key,
            self.summary_bias,
            self.lse[at],
            self.row[at],
            self.slot[at],
            *(self.page_table, self.page_size, self.topk, self.scale, self.offset),
            *(self.groups, self.normalised),
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
        """Columns of a tile."""
        return max(16, gpu.next_power_of_2(self.lmk_q.shape[2]))

    @property
    def group(self) -> int:
        """Query heads of a KV head, padded."""
        return gpu.next_power_of_2(self.heads // self.groups)

    @property
    def block(self) -> int:
        """Candidates of a block, of which the maximum is kept."""
        return block_of(self.pages)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.pages // self.block)

    @property
    def bias(self) -> Tensor:
        """A tensor to point at, where there is no bias too."""
        return self.lse if self.summary_bias is None else self.summary_bias

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory on the device, not written."""
        return gpu.empty(shape, dtype, self.lmk_q.device)

    def numbers(self) -> tuple[float, ...]:
        """offset, page size, scale and strides, in the kernels' order."""
        strides = (self.page_table.stride(0), *self.summary_key.stride()[:2])
        return (self.offset, self.page_size, self.scale, *strides)


def block_of(pages: int) -> int:
    """Candidates of a block, for rows of so many pages."""
    return 16 if pages <= 1 << 14 else 64


def accepts(lmk_q: Tensor, summary_key: Tensor, page_table: Tensor, groups: int, topk: int) -> bool:
    """Shapes that the kernels take: a program must be able to hold what it chooses from."""
    heads, dim = lmk_q.shape[1:]
    pages = page_table.shape[1]
    block = block_of(pages)
    blocks = gpu.next_power_of_2(-(-pages // block))
    group = gpu.next_power_of_2(-(-heads // groups))
    return (
        lmk_q.is_contiguous()
        and lmk_q.dtype == summary_key.dtype
        and summary_key.stride(2) == 1
        # A head's keys of all pages, then the next one's: kernels count so far in 32 bits.
        and summary_key.stride(1) * summary_key.shape[1] < 1 << 31
        and heads % summary_key.shape[1] == 0
        and 16 <= dim <= 256
        and topk > 0
        and blocks * group <= TUNING.select_most_numbers
        and min(gpu.next_power_of_2(topk), blocks) * block * group <= TUNING.select_most_numbers
    )


def select(job: Selection, *, few: bool) -> tuple[Tensor, Tensor]:
    """indices [T, h_kv, topk] int32 and scores [T, h_q, topk] float32, as the op defines them.

    Args:
        few: read the summaries once and hold every head's scores; otherwise twice, and hold the
            best of each group.
    """
    tokens = job.slot.numel()
    indices = job.empty(tokens, job.groups, job.topk, dtype=torch.int32)
    scores = job.empty(tokens, job.heads, job.topk)
    lines = job.heads if few else job.groups
    rounds = -(-tokens * 4 * lines * job.pages // TUNING.select_workspace_bytes)
    # A whole number of 16: the parts' addresses are as round as those of the whole.
    step = min(MOST_TOKENS, max(16, -(-tokens // max(1, rounds) // 16) * 16))
    for begin in range(0, tokens, step):
        at = slice(begin, begin + step)
        part = job.part(at) if tokens > step else job
        (_select_few if few else _select_many)(part, indices[at], scores[at])
    return indices, scores


def scoring(job: Selection) -> tuple[int, tuple[int, ...]]:
    """Programs that score a token's candidates for one KV head, and what they are compiled for."""
    tile = max(job.block, TUNING.select_tile_numbers // (job.group * job.width))
    wanted = max(
        TUNING.select_least_programs, -(-TUNING.select_programs // (job.slot.numel() * job.groups))
    )
    programs = max(1, min(-(-job.pages // tile), wanted))
    heads, dim = job.lmk_q.shape[1:]
    constants = (heads, job.groups, job.summary_key.shape[1], dim, job.group, job.width)
    return programs, (*constants, tile, job.block, job.summary_bias is not None)


def choosing(job: Selection) -> tuple[int, int, int, int]:
    """K, KB, BLOCKS and CB of `choose_kernel`."""
    width, blocks = gpu.next_power_of_2(job.topk), gpu.next_power_of_2(job.blocks)
    return width, min(width, blocks), blocks, job.block


def score(job: Selection, u: Tensor, part_best: Tensor, part_sum: Tensor) -> None:
    """Score all candidates; u [T, h_kv, pages, G], the others [T, h_kv, blocks, G]."""
    programs, constants = scoring(job)
    kernels.score_kernel[(programs, job.groups, job.slot.numel())](
        *(job.lmk_q, job.summary_key, job.bias, job.slot, job.row, job.page_table),
        *(u, part_best, part_sum, *job.numbers(), job.pages, job.blocks, *constants),
        num_warps=4,
    )


def _select_few(job: Selection, indices: Tensor, scores: Tensor) -> None:
    tokens, heads = job.slot.numel(), job.heads
    u = job.empty(tokens, job.pages, heads)
    part_best, part_sum = (job.empty(tokens, job.blocks, heads) for _ in range(2))
    score(job, u, part_best, part_sum)
    choosers.choose_kernel[(job.groups, tokens)](
        *(u, part_best, part_sum, job.lse, job.slot, indices, scores),
        *(job.offset, job.page_size, job.pages, job.blocks, job.topk),
        *(heads, job.groups, job.group, *choosing(job), job.normalised),
        num_warps=4,
    )


def _select_many(job: Selection, indices: Tensor, scores: Tensor) -> None:
    tokens, heads, dim = job.lmk_q.shape
    has_bias = job.summary_bias is not None
    total = _normalisers(job) if job.normalised else job.lse
    # Lines of whole sectors of memory: others would be written number by number.
    line = -(-job.pages // 32) * 32
    blocks = -(-line // job.block // 16) * 16
    best, tops = job.empty(tokens, job.groups, line), job.empty(tokens, job.groups, blocks)
    (_score_in_groups if in_groups(job) else _score_groups)(job, total, best, tops)
    # The best of a group of one head is that head's u.
    alone = heads == job.groups
    shape = choosing(job)
    few = min(TUNING.select_listed * shape[0], shape[1] * job.block)
    listed = job.empty(tokens, job.groups, few, dtype=torch.int32)
    choosers.choose_best_kernel[(job.groups, tokens)](
        *(best, tops, job.slot, listed, job.empty(tokens, job.groups, few), indices, scores),
        *(job.offset, job.page_size, line, blocks, job.topk),
        *(
            job.groups,
            *shape,
            max(1, (shape[2] // TUNING.select_least_blocks).bit_length()),
            few,
            alone,
        ),
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
        *(job.lmk_q, job.summary_key, job.bias, job.row, job.page_table, indices, scores),
        *(*job.numbers()[2:], job.topk, heads, job.groups, job.summary_key.shape[1], dim),
        *(job.group, job.width, min(step, gpu.next_power_of_2(job.topk)), has_bias),
        num_warps=2,
    )


def _normalisers(job: Selection) -> Tensor:
    """What is taken off each head's scores: [h_q, T]."""
    tokens, heads, dim = job.lmk_q.shape
    half = job.lmk_q.dtype != torch.float32
    rows = (128 if half else 64) if job.width <= 128 else 32
    ahead = 2 if not half else 5 if job.width <= 64 else 3
    total = job.empty(heads, tokens)
    kernels.normaliser_kernel[(heads, -(-tokens // rows))](
        *(job.lmk_q, job.summary_key, job.bias, job.lse, job.slot, job.row, job.page_table),
        *(total, tokens, *job.numbers(), heads, job.summary_key.shape[1], dim, job.width),
        *(rows, max(rows, 64), job.summary_bias is not None, "tf32" if half else "ieee", ahead),
        num_warps=4,
        num_stages=ahead,
    )
    return total


def in_groups(job: Selection) -> bool:
    """Whether many tokens' pages are scored in groups of warps."""
    key, (tokens, heads, dim) = job.summary_key, job.lmk_q.shape
    group = heads // job.groups
    addresses = (job.lmk_q.data_ptr(), key.data_ptr(), *key.stride()[:2])
    return (
        gpu.supports_wgmma(key.device)
        and key.dtype.itemsize == 2
        and job.group == group <= TUNING.select_most_heads.get(dim, 0)
        and job.pages >= TUNING.select_least_pages * group
        and tokens >= TUNING.select_tokens
        and TUNING.select_least_scale <= abs(job.scale) < math.inf
        and all(n % 16 == 0 for n in addresses)
    )


def _score_in_groups(job: Selection, total: Tensor, best: Tensor, tops: Tensor) -> None:
    tokens, heads, dim = job.lmk_q.shape
    tiles = -(-tokens // TUNING.select_tokens)
    # A program has most of a multiprocessor's memory.
    wave, most = gpu.processors(best.device), -(-job.pages // TUNING.select_tile)
    programs = whole_waves(tiles * job.groups, wave, most)
    group_scores_kernel[(programs, job.groups, tiles)](
        *(job.lmk_q, job.summary_key, job.bias, total, job.slot, job.row, job.page_table),
        *(best, tops, tokens, *job.numbers(), best.shape[2], tops.shape[2]),
        *(
            heads,
            job.groups,
            job.summary_key.shape[1],
            dim,
            TUNING.select_tile,
            job.block,
            TUNING.select_stages,
        ),
        *(job.summary_bias is not None, job.normalised),
        num_warps=4,
    )


def _score_groups(job: Selection, total: Tensor, best: Tensor, tops: Tensor) -> None:
    tokens, heads, dim = job.lmk_q.shape
    half = job.lmk_q.dtype != torch.float32
    large = half and job.width <= 128 and (job.width > 64 or job.pages > TUNING.select_many_pages)
    rows = 32 if job.width > 128 else 128 if half and not large else 64
    columns = 128 if large else min(rows, 64)
    stages = 3 if half else 2
    tiles = -(-tokens // rows)
    wanted = 2 * TUNING.select_programs if large else TUNING.select_programs
    programs = max(1, min(-(-job.pages // columns), -(-wanted // (tiles * job.groups))))
    kernels.group_kernel[(programs, job.groups, tiles)](
        *(job.lmk_q, job.summary_key, job.bias, total, job.slot, job.row, job.page_table),
        *(best, tops, tokens, *job.numbers(), best.shape[2], tops.shape[2]),
        *(heads, job.groups, job.summary_key.shape[1], dim, job.width, job.group),
        *(rows, columns, job.block, job.summary_bias is not None, job.normalised),
        *("tf32" if half else "ieee", stages),
        num_warps=4,
        num_stages=stages,
    )
