"""How page_attention is launched on a GPU: by the number of tokens, never by their lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu, grid_barrier
from cairn.ops.landmark.kernels import pages as kernels
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.pdl import pdl_option


@dataclass(frozen=True, slots=True)
class Pages:
    """One call of page_attention, on the device; q .. weights as in the op, the scale given."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    row: Tensor
    page_table: Tensor
    indices: Tensor
    weights: Tensor
    scale: float

    def part(self, at: slice) -> Pages:
        """The same for some of the tokens."""
        own = (self.row[at], self.page_table, self.indices[at], self.weights[at], self.scale)
        return Pages(self.q[at], self.k_cache, self.v_cache, *own)

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return self.q.shape[1], self.k_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a KV head, padded."""
        return gpu.next_power_of_2(self.q.shape[1] // self.k_cache.shape[1])

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return max(16, gpu.next_power_of_2(self.q.shape[2]))

    @property
    def keys(self) -> int:
        """Slots of a page, padded."""
        return max(16, gpu.next_power_of_2(self.k_cache.shape[2]))

    @property
    def line_bytes(self) -> int:
        """Of one head's key, or value, in a slot."""
        return self.k_cache.stride(2) * self.k_cache.element_size()

    @property
    def warps(self) -> int:
        """Of a program that reads pages of one token."""
        return 2 if self.width * self.keys <= 4096 else 4

    @property
    def ahead(self) -> int:
        """Parts of a line that its last program adds up at a time."""
        return max(1, min(TUNING.page_most_ahead, TUNING.page_merged // (self.group * self.width)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Query heads, KV heads, head width and page size."""
        return (*self.heads, self.q.shape[2], self.k_cache.shape[2])

    @property
    def unit_pairs(self) -> int:
        """Tokens that one program takes on a page at a time, at most."""
        return max(TUNING.page_unit_pairs, TUNING.page_unit_lines // self.group)

    @property
    def precision(self) -> str:
        """Of the products."""
        return "ieee" if self.q.dtype == torch.float32 else "tf32"

    @property
    def splits(self) -> tuple[int, int]:
        """Programs that share a token's pages, and the pages of each."""
        topk, lines = self.indices.shape[-1], self.q.shape[0] * self.k_cache.shape[1]
        each = -(-topk // max(1, min(topk, -(-TUNING.page_split_programs // lines))))
        return -(-topk // each), each

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory on the device, not written."""
        return gpu.empty(shape, dtype, self.q.device)

    def numbers(self, *lengths: int) -> tuple[Tensor, ...]:
        """So many int32 each, not written, all of them at round addresses."""
        padded = [-(-length // 4) * 4 for length in lengths]
        parts: tuple[Tensor, ...] = self.empty(sum(padded), dtype=torch.int32).split(padded)
        return parts


def attend_few(job: Pages) -> Tensor:
    """page_attention with programs that share a token's pages: o [T, h_q, d] float32."""
    tokens, heads, dim = job.q.shape
    out = job.empty(tokens, heads, dim)
    if tokens == 0 or job.indices.shape[-1] == 0:
        return out.zero_()
    (splits, each), lines = job.splits, tokens * job.k_cache.shape[1]
    parts = out if splits == 1 else job.empty(tokens, heads, splits, dim)
    counters = None if splits == 1 else grid_barrier.counters(lines, job.q.device)
    pdl = gpu.supports_pdl(job.q.device)
    strides = (job.page_table.stride(0), *job.k_cache.stride()[:2])
    kernels.pages_kernel[(splits, job.k_cache.shape[1], tokens)](
        *(job.q, job.k_cache, job.v_cache, job.row, job.page_table, job.indices, job.weights),
        *(parts, out, counters, job.scale, *strides, job.indices.shape[-1], each),
        *(*job.shape, job.group, max(16, job.group), job.width, job.keys),
        *(gpu.next_power_of_2(each), job.ahead, grid_barrier.APART, job.precision, pdl),
        num_warps=job.warps,
        num_stages=2,
        **pdl_option(pdl),
    )
    return out


def attend_sorted(job: Pages) -> Tensor:
    """page_attention page by page, with the tokens that selected it: o [T, h_q, d] float32."""
    tokens, heads, dim = job.q.shape
    out = job.empty(tokens, heads, dim)
    topk = job.indices.shape[-1]
    if topk == 0:
        return out.zero_()
    per_token = heads * topk * dim * job.q.element_size()
    rounds = max(1, round(tokens * per_token / TUNING.page_parts_bytes))
    # A whole number of 16: the parts' addresses are as round as those of the whole.
    step = max(16, -(-tokens // rounds // 16) * 16)
    for begin in range(0, tokens, step):
        at = slice(begin, begin + step)
        part = job.part(at) if tokens > step else job
        parts, places = _attend_pairs(part)
        _reduce(part, parts, places, out[at])
    return out


def _attend_pairs(job: Pages) -> tuple[Tensor, Tensor]:
    """Sort the pairs and attend page by page: the sorted results [pairs, G, d] in q's dtype, and
    where each pair's lies [pairs]."""
    heads, dim = job.q.shape[1:]
    kv_heads, pages = job.k_cache.shape[1], job.k_cache.shape[0]
    topk, pairs, lines = job.indices.shape[-1], job.indices.numel(), kv_heads * pages
    copies = TUNING.page_copies if lines <= TUNING.page_copied else 1
    parts = job.empty(pairs, heads // kv_heads, dim, dtype=job.q.dtype)
    most = pairs // job.unit_pairs + min(pairs, lines)
    lengths = (*[pairs] * 4, *[lines] * 3, *[most] * 3)
    line_of, rank, places, token_at, *others = job.numbers(*lengths)
    if pairs == 0:
        return parts, places
    given, units = others[:3], others[3:]
    counts = gpu.zeros((lines * copies * TUNING.page_apart + 2,), torch.int32, job.q.device)
    cursors = counts[-2:]
    per_block = (-(-pairs // TUNING.page_block),)
    kernels.count_kernel[per_block](
        *(job.indices, job.row, job.page_table, counts, line_of, rank, pairs, pages),
        *(job.page_table.stride(0), topk, kv_heads, copies, TUNING.page_apart, TUNING.page_block),
        num_warps=4,
    )
    kernels.place_kernel[(-(-lines // TUNING.page_block),)](
        *(
            counts,
            cursors,
            *given,
            lines,
            job.unit_pairs,
            copies,
            TUNING.page_apart,
            TUNING.page_block,
        ),
        num_warps=4,
    )
    kernels.order_kernel[per_block](
        *(line_of, rank, counts, *given, places, token_at, *units, pairs, topk),
        *(kv_heads, job.unit_pairs, copies, TUNING.page_apart, TUNING.page_block),
        num_warps=4,
    )
    half = job.q.dtype != torch.float32
    rows = TUNING.page_unit_rows if half else 32
    kernels.unit_kernel[(min(most, TUNING.page_unit_programs),)](
        *(job.q, job.k_cache, job.v_cache, token_at, cursors, *units, parts),
        *(job.scale, *job.k_cache.stride()[:2], pages, *job.shape),
        *(job.group, job.width, job.keys, max(1, rows // job.group), job.scale > 0, job.precision),
        num_warps=4 if job.width * job.keys <= 8192 else 8,
        num_stages=2 if not half else 5 if job.width * job.keys <= 16384 else 3,
    )
    return parts, places


def _reduce(job: Pages, parts: Tensor, places: Tensor, out: Tensor) -> None:
    """Add up the pairs of every token."""
    tokens, heads, dim = job.q.shape
    kv_heads, topk = job.k_cache.shape[1], job.indices.shape[-1]
    width = gpu.next_power_of_2(max(1, topk))
    kernels.reduce_kernel[(tokens * kv_heads,)](
        parts,
        places,
        job.weights,
        out,
        topk=topk,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        GP=job.group,
        DP=job.width,
        STEP=max(1, min(4096 // (job.group * job.width), width)),
        num_warps=1,
        **gpu.ONE_SUM,
    )
