"""Launches of exact selections. They depend on the sizes of rows, not on their values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.select_k.kernels import bound_kernel, list_kernel, mask_kernel, threshold_kernel
from cairn.ops.select_k.tuning import TUNING


class Lists(NamedTuple):
    """Candidates of each row's k largest, as written by `bound_kernel` and `list_kernel`."""

    floors: Tensor
    lists: Tensor
    counts: Tensor


class Sizes(NamedTuple):
    """How rows are searched.

    Attributes:
        room: capacity of a program that selects, in candidates.
        chunk, chunks: candidates that one program lists, and the lists of a row.
    """

    room: int
    chunk: int
    chunks: int


def sizes_of(width: int, topk: int) -> Sizes:
    """Sizes for rows of this width, of which about topk are selected."""
    room = max(TUNING.min_room, gpu.next_power_of_2(topk + topk // 2))
    room = min(room, gpu.next_power_of_2(max(32, width)))
    chunk = max(
        TUNING.chunk,
        min(TUNING.max_chunk, gpu.next_power_of_2(max(1, width)) // TUNING.max_lists),
    )
    return Sizes(room, chunk, -(-width // chunk))


def warps_of(block: int) -> int:
    """Warps of a program for this many elements per iteration."""
    return max(1, min(32, block // 256))


def registers_of(programs: int, device: torch.device) -> dict[str, int]:
    """The launch option that limits registers per thread where programs share multiprocessors."""
    return {"maxnreg": TUNING.registers} if programs > gpu.sm_count(device) else {}


def list_rows(
    score: Tensor,
    sizes: Sizes,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    top_k: Tensor | None = None,
    topk: int = 0,
    nan: float = -torch.inf,
    pdl: bool,
) -> Lists:
    """Lists of all rows that have more than `sizes.room` candidates.

    Args:
        score: [B, L], any float dtype.
        lengths, starts: [B] int32, of the candidates of each row; None: all from the first on.
        top_k, topk: how many are selected, [B] or of every row.
        nan: what NaN counts as.
    """
    batch, width = score.shape
    found = Lists(
        gpu.empty((batch,), torch.float32, score.device),
        gpu.empty((batch, sizes.chunks, sizes.chunk), torch.int32, score.device),
        gpu.empty((batch, sizes.chunks), torch.int32, score.device),
    )
    sample = min(
        TUNING.samples[1], max(TUNING.samples[0], gpu.next_power_of_2(width // TUNING.part))
    )
    bound_kernel[(batch,)](
        score=score,
        lengths=lengths,
        starts=starts,
        top_k=top_k,
        floors=found.floors,
        stride=score.stride(0),
        width=width,
        topk=topk,
        ROOM=sizes.room,
        SAMPLE=sample,
        SURE=TUNING.sure,
        NAN=nan,
        PDL=pdl,
        num_warps=warps_of(sample),
    )
    list_kernel[(batch, sizes.chunks)](
        score=score,
        lengths=lengths,
        starts=starts,
        **found._asdict(),
        stride=score.stride(0),
        width=width,
        ROOM=sizes.room,
        CHUNK=sizes.chunk,
        LINE=TUNING.line,
        NAN=nan,
        PDL=pdl,
        num_warps=warps_of(sizes.chunk),
        maxnreg=TUNING.registers,
    )
    return found


def mask_smaller(logits: Tensor, top_k: Tensor) -> Tensor:
    """The top_k [B] largest of logits [B, V] and their equals, the others -inf; NaN is above all
    and becomes -inf. Rows with top_k < 1 or >= V are kept."""
    out = gpu.empty(logits.shape, logits.dtype, logits.device)
    for begin in range(0, len(logits), TUNING.mask_rows):
        at = slice(begin, begin + TUNING.mask_rows)
        _mask(logits[at], top_k[at], out[at])
    return out


def _mask(logits: Tensor, top_k: Tensor, out: Tensor) -> None:
    (rows, width), pdl = logits.shape, gpu.supports_pdl(logits.device)
    sizes = sizes_of(width, 0)
    found = None
    if width > sizes.room:
        found = list_rows(logits, sizes, top_k=top_k, nan=torch.inf, pdl=pdl)
    floors, lists, counts = found or (None, None, None)
    thresholds = gpu.empty((rows,), torch.float32, logits.device)
    listed = pdl and found is not None
    threshold_kernel[(rows,)](
        score=logits,
        top_k=top_k,
        floors=floors,
        lists=lists,
        counts=counts,
        thresholds=thresholds,
        stride=logits.stride(0),
        width=width,
        chunks=sizes.chunks,
        ROOM=sizes.room,
        CHUNK=sizes.chunk,
        CHUNKS=gpu.next_power_of_2(sizes.chunks),
        PDL=listed,
        num_warps=warps_of(sizes.room),
        **registers_of(rows, logits.device),
    )
    mask_kernel[(-(-width // TUNING.mask_block), rows)](
        x=logits,
        top_k=top_k,
        thresholds=thresholds,
        out=out,
        stride=logits.stride(0),
        width=width,
        BLOCK=TUNING.mask_block,
        PDL=pdl,
        num_warps=TUNING.mask_warps,
    )
