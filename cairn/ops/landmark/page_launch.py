"""Launch of page_attention on a GPU, which depends on the number of tokens, never on their
lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu, grid_barrier
from cairn.ops.landmark.kernels import pages as kernels
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.pdl import pdl_option


@dataclass(frozen=True, slots=True)
class Pages:
    """A call of page_attention on a GPU; q .. weights as in the op, with an explicit scale."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    row: Tensor
    page_table: Tensor
    indices: Tensor
    weights: Tensor
    scale: float

    def part(self, at: slice) -> Pages:
        """The call restricted to some tokens."""
        own = (self.row[at], self.page_table, self.indices[at], self.weights[at], self.scale)
        return Pages(self.q[at], self.k_cache, self.v_cache, *own)

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return self.q.shape[1], self.k_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head, padded."""
        return gpu.next_power_of_2(self.q.shape[1] // self.k_cache.shape[1])

    @property
    def width(self) -> int:
        """Width of a tile."""
        return max(16, gpu.next_power_of_2(self.q.shape[2]))

    @property
    def keys(self) -> int:
        """Page size, padded."""
        return max(16, gpu.next_power_of_2(self.k_cache.shape[2]))

    @property
    def line_bytes(self) -> int:
        """Bytes of one head's key, or value, in a slot."""
        return self.k_cache.stride(2) * self.k_cache.element_size()

    @property
    def warps(self) -> int:
        """Warps per program that reads pages of one token."""
        return 2 if self.width * self.keys <= 4096 else 4

    @property
    def ahead(self) -> int:
        """Parts of a row that its last program sums at a time."""
        return max(1, min(TUNING.page_max_ahead, TUNING.page_merged // (self.group * self.width)))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments shared by the kernels of a call."""
        heads, kv_heads = self.heads
        return {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "row": self.row,
            "page_table": self.page_table,
            "indices": self.indices,
            "weights": self.weights,
            "scale": self.scale,
            "table_stride": self.page_table.stride(0),
            "page_stride": self.k_cache.stride(0),
            "head_stride": self.k_cache.stride(1),
            "topk": self.indices.shape[-1],
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": self.q.shape[2],
            "SIZE": self.k_cache.shape[2],
            "GP": self.group,
            "DP": self.width,
            "KEYS": self.keys,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
        }

    @property
    def unit_pairs(self) -> int:
        """Most tokens per page that one program processes at a time."""
        return max(TUNING.page_unit_pairs, TUNING.page_unit_lines // self.group)

    @property
    def splits(self) -> tuple[int, int]:
        """Programs per token, and pages per program."""
        topk, lines = self.indices.shape[-1], self.q.shape[0] * self.k_cache.shape[1]
        each = -(-topk // max(1, min(topk, -(-TUNING.page_split_programs // lines))))
        return -(-topk // each), each

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory on the device."""
        return gpu.empty(shape, dtype, self.q.device)

    def empty_int32(self, *lengths: int) -> tuple[Tensor, ...]:
        """Uninitialised int32 tensors of these lengths at aligned addresses."""
        padded = [-(-length // 4) * 4 for length in lengths]
        parts: tuple[Tensor, ...] = self.empty(sum(padded), dtype=torch.int32).split(padded)
        return parts


def attend_few(job: Pages) -> Tensor:
    """page_attention by several programs per token: o [T, h_q, d] float32."""
    tokens, heads, dim = job.q.shape
    out = job.empty(tokens, heads, dim)
    if tokens == 0 or job.indices.shape[-1] == 0:
        return out.zero_()
    (splits, each), lines = job.splits, tokens * job.k_cache.shape[1]
    parts = out if splits == 1 else job.empty(tokens, heads, splits, dim)
    counters = None if splits == 1 else grid_barrier.counters(lines, job.q.device)
    pdl = gpu.supports_pdl(job.q.device)
    kernels.pages_kernel[(splits, job.k_cache.shape[1], tokens)](
        **gpu.select_arguments(kernels.pages_kernel, job.arguments()),
        parts=parts,
        o=out,
        counters=counters,
        each=each,
        ROWS=max(16, job.group),
        EACH=gpu.next_power_of_2(each),
        AHEAD=job.ahead,
        APART=grid_barrier.STRIDE,
        PDL=pdl,
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
    # A multiple of 16 keeps slices aligned like the whole tensor, so that no kernel is compiled
    # again.
    step = max(16, -(-tokens // rounds // 16) * 16)
    for begin in range(0, tokens, step):
        at = slice(begin, begin + step)
        part = job.part(at) if tokens > step else job
        parts, places = _attend_pairs(part)
        _reduce(part, parts, places, out[at])
    return out


def _attend_pairs(job: Pages) -> tuple[Tensor, Tensor]:
    """Sort the pairs and attend page by page: the sorted results [pairs, G, d] in q's dtype, and
    the index of each pair's result [pairs]."""
    heads, dim = job.q.shape[1:]
    kv_heads, pages = job.k_cache.shape[1], job.k_cache.shape[0]
    pairs, lines = job.indices.numel(), kv_heads * pages
    parts = job.empty(pairs, heads // kv_heads, dim, dtype=job.q.dtype)
    most = pairs // job.unit_pairs + min(pairs, lines)
    buffers = job.empty_int32(*[pairs] * 4, *[lines] * 3, *[most] * 3)
    line_of, rank, places, token_at, sizes, starts, units, unit_line, unit_first, unit_of = buffers
    if pairs == 0:
        return parts, places
    counts = gpu.zeros((lines * TUNING.page_apart + 2,), torch.int32, job.q.device)
    arguments = job.arguments() | {
        "counts": counts,
        "cursors": counts[-2:],
        "lines": line_of,
        "ranks": rank,
        "sizes": sizes,
        "starts": starts,
        "units": units,
        "places": places,
        "tokens": token_at,
        "unit_line": unit_line,
        "unit_first": unit_first,
        "unit_pairs": unit_of,
        "pairs": pairs,
        "pages": pages,
        "parts": parts,
        "MOST": job.unit_pairs,
        "APART": TUNING.page_apart,
        "BLOCK": TUNING.page_block,
    }
    per_block = (-(-pairs // TUNING.page_block),)
    count, place, order = kernels.count_kernel, kernels.place_kernel, kernels.order_kernel
    count[per_block](**gpu.select_arguments(count, arguments), num_warps=4)
    place[(-(-lines // TUNING.page_block),)](
        **gpu.select_arguments(place, arguments | {"lines": lines}), num_warps=4
    )
    order[per_block](**gpu.select_arguments(order, arguments), num_warps=4)
    half = job.q.dtype != torch.float32
    rows = TUNING.page_unit_rows if half else 32
    kernels.unit_kernel[(min(most, TUNING.page_unit_programs),)](
        **gpu.select_arguments(kernels.unit_kernel, arguments),
        PAIRS=max(1, rows // job.group),
        POSITIVE=job.scale > 0,
        num_warps=4 if job.width * job.keys <= 8192 else 8,
        num_stages=2 if not half else 5 if job.width * job.keys <= 16384 else 3,
    )
    return parts, places


def _reduce(job: Pages, parts: Tensor, places: Tensor, out: Tensor) -> None:
    """Sum the pairs of every token."""
    tokens, topk = job.q.shape[0], job.indices.shape[-1]
    width = gpu.next_power_of_2(max(1, topk))
    kernels.reduce_kernel[(tokens * job.k_cache.shape[1],)](
        **gpu.select_arguments(kernels.reduce_kernel, job.arguments()),
        parts=parts,
        places=places,
        o=out,
        STEP=max(1, min(4096 // (job.group * job.width), width)),
        num_warps=1,
        **gpu.NO_FP_FUSION,
    )
