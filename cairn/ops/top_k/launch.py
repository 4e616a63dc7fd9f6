"""Launch of the selection, which depends on the sizes of the rows only, never on their scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.pdl import pdl_option
from cairn.ops.select_k import launch as select_k
from cairn.ops.top_k.kernels.select import choose_kernel
from cairn.ops.top_k.selection import Rows


class Pages(NamedTuple):
    """A page table [Bq, n] int32; cu_seqlens of its requests' rows [Bq + 1] int32, or the request
    of each row [B] int64; and the page size."""

    table: Tensor
    bounds: Tensor | None
    size: int
    owners: Tensor | None = None


def accepts(rows: Rows) -> bool:
    """Whether the kernels can read these rows."""
    near = rows.score.stride(1) == 1 or rows.score.shape[1] <= 1
    numbers = (rows.lengths, rows.starts)
    return near and all(x is None or x.is_contiguous() for x in numbers)


def select(rows: Rows, pages: Pages | None = None, offset: Tensor | None = None) -> Tensor:
    """[B, topk] int32: `selection.select`, through a page table or moved by an offset [B]."""
    score, lengths, starts, topk = rows
    batch, width = score.shape
    out = gpu.empty((batch, topk), torch.int32, score.device)
    if not batch:
        return out
    sizes, pdl = select_k.sizes_of(width, topk), gpu.supports_pdl(score.device)
    found = None
    if width > sizes.room:
        found = select_k.list_rows(score, sizes, lengths=lengths, starts=starts, topk=topk, pdl=pdl)
    floors, lists, counts = found or (None, None, None)
    table, bounds, size, owners = (None, None, 1, None) if pages is None else pages
    requests = 0 if table is None else table.shape[0]
    pdl = pdl and lists is not None
    choose_kernel[(batch,)](
        score,
        lengths=lengths,
        starts=starts,
        floors=floors,
        lists=lists,
        counts=counts,
        table=table,
        bounds=bounds,
        owners=owners,
        offset=offset,
        out=out,
        stride=score.stride(0),
        width=width,
        chunks=sizes.chunks,
        topk=topk,
        table_stride=0 if table is None else table.stride(0),
        columns=0 if table is None else table.shape[1],
        requests=requests,
        page_size=size,
        ROOM=sizes.room,
        CHUNK=sizes.chunk,
        CHUNKS=gpu.next_power_of_2(sizes.chunks),
        KP=gpu.next_power_of_2(topk),
        BP=gpu.next_power_of_2(requests + 1),
        PDL=pdl,
        num_warps=select_k.warps_of(sizes.room),
        **select_k.registers_of(batch, score.device),
        **pdl_option(pdl),
    )
    return out
