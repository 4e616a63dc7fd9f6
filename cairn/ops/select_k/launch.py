"""How exact selections are launched: by the sizes of the rows, never by what is in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.pdl import pdl_option
from cairn.ops.select_k.kernels import bound_kernel, list_kernel, mask_kernel, threshold_kernel

LEAST_ROOM = 4096
"""Candidates that one program takes at once, at least; half as many again as are chosen, since
lists hold some more than that."""
SAMPLES = (1 << 10, 1 << 12)
"""Fewest and most scores that are looked at for a bound."""
PART = 16
"""One score of so many is, between these."""
SURE = 4.0
"""Standard deviations by which a bound is lower than what the sample says."""
CHUNK = 1 << 10
"""Candidates that one program lists, if the lists of a row are not too many."""
MOST_LISTS, MOST_CHUNK = 1 << 10, 1 << 14
"""Of a row, but for those that have more of the longest lists: a count of one has 16 bits."""
LINE = 1 << 7
"""Scores of float32 that a warp loads at once."""
MOST_ROWS = gpu.MOST_PROGRAMS
"""Rows of one launch."""
REGISTERS = 64
"""Of a thread that lists, and of one that chooses where rows share multiprocessors: more programs
lie beside each other. Equal scores, which most rows do not have, would take more."""
MASK_BLOCK, MASK_WARPS = 2048, 4
"""Numbers and warps of a program of `mask_kernel`."""


class Lists(NamedTuple):
    """What may be among the best of each row: see `bound_kernel` and `list_kernel`."""

    floors: Tensor
    lists: Tensor
    counts: Tensor


class Sizes(NamedTuple):
    """How rows are searched.

    Attributes:
        room: candidates that one program takes at once.
        chunk, chunks: candidates that one program lists, and the lists of a row.
    """

    room: int
    chunk: int
    chunks: int


def sizes_of(width: int, topk: int) -> Sizes:
    """Of rows of this width, of which about topk are selected."""
    room = max(LEAST_ROOM, gpu.next_power_of_2(topk + topk // 2))
    room = min(room, gpu.next_power_of_2(max(32, width)))
    chunk = max(CHUNK, min(MOST_CHUNK, gpu.next_power_of_2(max(1, width)) // MOST_LISTS))
    return Sizes(room, chunk, -(-width // chunk))


def warps_of(block: int) -> int:
    """Of a program that handles so many numbers at once."""
    return max(1, min(32, block // 256))


def registers_of(programs: int, device: torch.device) -> dict[str, int]:
    """An option that limits the registers of threads where programs share multiprocessors."""
    return {"maxnreg": REGISTERS} if programs > gpu.processors(device) else {}


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
    sample = min(SAMPLES[1], max(SAMPLES[0], gpu.next_power_of_2(width // PART)))
    bound_kernel[(batch,)](
        score,
        lengths=lengths,
        starts=starts,
        top_k=top_k,
        floors=found.floors,
        stride=score.stride(0),
        width=width,
        topk=topk,
        ROOM=sizes.room,
        SAMPLE=sample,
        SURE=SURE,
        NAN=nan,
        PDL=pdl,
        num_warps=warps_of(sample),
    )
    list_kernel[(batch, sizes.chunks)](
        score,
        lengths=lengths,
        starts=starts,
        **found._asdict(),
        stride=score.stride(0),
        width=width,
        ROOM=sizes.room,
        CHUNK=sizes.chunk,
        LINE=LINE,
        NAN=nan,
        PDL=pdl,
        num_warps=warps_of(sizes.chunk),
        maxnreg=REGISTERS,
        **pdl_option(pdl),
    )
    return found


def mask_smaller(logits: Tensor, top_k: Tensor) -> Tensor:
    """The top_k [B] largest of logits [B, V] and their equals, the others -inf; NaN is above all
    and becomes -inf. Rows with top_k < 1 or >= V are kept."""
    out = gpu.empty(logits.shape, logits.dtype, logits.device)
    for begin in range(0, len(logits), MOST_ROWS):
        at = slice(begin, begin + MOST_ROWS)
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
        logits,
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
        **pdl_option(listed),
    )
    mask_kernel[(-(-width // MASK_BLOCK), rows)](
        logits,
        top_k=top_k,
        thresholds=thresholds,
        out=out,
        stride=logits.stride(0),
        width=width,
        BLOCK=MASK_BLOCK,
        PDL=pdl,
        num_warps=MASK_WARPS,
        **pdl_option(pdl),
    )
