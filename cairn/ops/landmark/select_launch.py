"""How select_pages is launched on a GPU: by the number of tokens, never by their candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.landmark.kernels import select as kernels

FEW_TOKENS = 256
"""At most this many tokens are worth holding every head's scores."""
PROGRAMS = 528
"""Programs that fill a large device; fewer tokens are scored by more programs each."""
SPAN = 512
"""Candidates of which one program keeps the best."""
WORKSPACE_BYTES = 256 << 20
"""Scores are held for so many tokens at a time."""
MOST_WINNERS = 1 << 14


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
    def block(self) -> int:
        """Candidates scored at once."""
        return 64 if self.width <= 128 else 32

    @property
    def bias(self) -> Tensor:
        """A tensor to point at, where there is no bias too."""
        return self.lse if self.summary_bias is None else self.summary_bias

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory on the device, not written."""
        return torch.empty(shape, dtype=dtype, device=self.lmk_q.device)

    def numbers(self) -> tuple[float, ...]:
        """offset, page size, scale and strides, in the kernels' order."""
        strides = (self.page_table.stride(0), *self.summary_key.stride()[:2])
        return (self.offset, self.page_size, self.scale, *strides)


def accepts(lmk_q: Tensor, summary_key: Tensor, topk: int) -> bool:
    """Shapes that the kernels take."""
    heads, dim = lmk_q.shape[1:]
    return (
        lmk_q.is_contiguous()
        and lmk_q.dtype == summary_key.dtype
        and summary_key.stride(2) == 1
        and heads % summary_key.shape[1] == 0
        and 16 <= dim <= 256
        and 0 < topk <= 1024
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
    step = max(16, WORKSPACE_BYTES // (4 * lines * max(1, job.pages)))
    for begin in range(0, tokens, step):
        at = slice(begin, begin + step)
        part = job.part(at) if tokens > step else job
        (_select_few if few else _select_many)(part, indices[at], scores[at])
    return indices, scores


def _select_few(job: Selection, indices: Tensor, scores: Tensor) -> None:
    tokens, heads, blocks = job.slot.numel(), job.heads, -(-job.pages // job.block)
    u = job.empty(tokens, heads, job.pages)
    part_best, part_sum = job.empty(tokens, heads, blocks), job.empty(tokens, heads, blocks)
    programs = max(1, min(blocks, -(-PROGRAMS // (tokens * job.groups))))
    kernels.score_kernel[(programs, job.groups, tokens)](
        *(job.lmk_q, job.summary_key, job.bias, job.slot, job.row, job.page_table),
        *(u, part_best, part_sum, *job.numbers(), job.pages, blocks),
        *(heads, job.groups, job.summary_key.shape[1], job.lmk_q.shape[2], job.width, job.block),
        job.summary_bias is not None,
        num_warps=4,
    )
    _best(job, u, (part_best, part_sum), None, indices, scores)


def _select_many(job: Selection, indices: Tensor, scores: Tensor) -> None:
    tokens, heads, dim = job.lmk_q.shape
    key_heads, has_bias = job.summary_key.shape[1], job.summary_bias is not None
    precision = "ieee" if job.lmk_q.dtype == torch.float32 else "tf32"
    rows = 64 if job.width <= 128 else 32
    tiles = -(-tokens // rows)
    where = (job.slot, job.row, job.page_table)
    total = job.lse
    if job.normalised:
        total = job.empty(tokens, heads)
        kernels.normaliser_kernel[(tiles, heads)](
            *(job.lmk_q, job.summary_key, job.bias, job.lse, *where, total),
            *(tokens, *job.numbers(), heads, key_heads, dim, job.width, rows, job.block),
            *(has_bias, precision),
            num_warps=4,
            num_stages=2,
        )
    best = job.empty(tokens, job.groups, job.pages)
    columns = max(1, min(-(-job.pages // job.block), -(-PROGRAMS // (tiles * job.groups))))
    kernels.group_kernel[(tiles, job.groups, columns)](
        *(job.lmk_q, job.summary_key, job.bias, total, *where, best),
        *(tokens, *job.numbers(), job.pages, heads, job.groups, key_heads, dim, job.width),
        *(rows, job.block, has_bias, job.normalised, precision),
        num_warps=4,
        num_stages=2,
    )
    _best(job, None, None, best, indices, scores)
    kernels.rescore_kernel[(heads, tokens)](
        *(job.lmk_q, job.summary_key, job.bias, job.row, job.page_table, indices, scores),
        *(*job.numbers()[2:], job.topk, heads, job.groups, key_heads, dim, job.width),
        *(gpu.next_power_of_2(job.topk), has_bias),
        num_warps=4,
    )


def _best(
    job: Selection,
    u: Tensor | None,
    parts: tuple[Tensor, Tensor] | None,
    score: Tensor | None,
    indices: Tensor,
    scores: Tensor,
) -> None:
    """Keep the topk best, from u with its partial normalisers or from the groups' scores."""
    tokens, blocks = job.slot.numel(), -(-job.pages // job.block)
    span = max(SPAN, gpu.next_power_of_2(job.topk))
    spans = -(-job.pages // span)
    final = spans == 1
    winners = spans * job.topk
    win_score = scores if final else job.empty(tokens, job.groups, winners)
    win_page = indices if final else job.empty(tokens, job.groups, winners, dtype=torch.int32)
    values = u if u is not None else job.lse
    part_best, part_sum = parts if parts is not None else (job.lse, job.lse)
    kernels.best_kernel[(spans, job.groups, tokens)](
        *(values, part_best, part_sum, job.lse, job.lse if score is None else score, job.slot),
        *(win_score, win_page, indices, scores),
        *(job.offset, job.page_size, job.pages, blocks, job.topk, job.heads, job.groups),
        *(job.block, gpu.next_power_of_2(blocks), span),
        *(u is not None, job.normalised, final, u is not None),
        num_warps=4,
    )
    if not final:
        kernels.final_kernel[(job.groups, tokens)](
            *(values, win_score, win_page, indices, scores, job.pages, winners, job.topk),
            *(job.heads, job.groups, gpu.next_power_of_2(winners), u is not None),
            num_warps=4,
        )
