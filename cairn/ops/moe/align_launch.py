"""Launch of the kernels that sort (token, expert) pairs by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.moe.kernels.align import begins_kernel, count_kernel, place_kernel, sort_kernel
from cairn.ops.moe.tuning import TUNING

MAX_BUCKETS = 4095
MIN_BUCKETS, MIN_CHUNK = 32, 128
"""Fewest buckets, and fewest pairs, of a counting program: one bucket per thread of a warp, one
pair per thread of four warps."""
SCALES = 128
"""The block scales of an expert begin at a row that is a multiple of this."""


@dataclass(frozen=True, slots=True, eq=False)
class Sorted:
    """Outputs of the sort, all int32 and contiguous; see `sort_kernel`.

    Attributes:
        order: [rows].
        begins: [buckets + 1].
        used: [1].
        owners: [blocks].
        inverse: [pairs].
        sizes: problem sizes [buckets, 3] of both products, and the widths n and k in them.
        scale_begins: [buckets + 1].
    """

    order: Tensor
    begins: Tensor
    used: Tensor | None = None
    owners: Tensor | None = None
    inverse: Tensor | None = None
    sizes: tuple[Tensor, Tensor, int, int] | None = None
    scale_begins: Tensor | None = None


def accepts(ids: Tensor, buckets: int, *written: Tensor | None) -> bool:
    """Whether the kernels can sort these ids: contiguous, with no more buckets than a program
    counts."""
    dense = all(x is None or x.is_contiguous() for x in (ids, *written))
    return dense and buckets <= MAX_BUCKETS


def sort(
    ids: Tensor,
    buckets: int,
    into: Sorted,
    *,
    first: int = 0,
    block: int = 1,
    share: int = 1,
    filled: bool = False,
) -> None:
    """Sort the pairs of ids [T, k] by bucket.

    Args:
        ids: int32 or int64.
        buckets: number of buckets.
        into: the outputs.
        first: bucket of id 0.
        block: rows of a bucket are padded to a multiple of this.
        share: pairs are divided by it where they are stored (k gives the token's row).
        filled: padding rows are filled with the number of pairs.
    """
    pairs, padded = ids.numel(), max(MIN_BUCKETS, gpu.next_power_of_2(buckets + 1))
    sizes1, sizes2, n, k = into.sizes or (None, None, 0, 0)
    of_pairs: dict[str, Any] = {
        "ids": ids,
        "pairs": pairs,
        "buckets": buckets,
        "BP": padded,
        "FIRST": first,
        "PDL": gpu.supports_pdl(ids.device),
    }
    of_begins: dict[str, Any] = {
        "begins": into.begins,
        "used": into.used,
        "sizes1": sizes1,
        "sizes2": sizes2,
        "scale_begins": into.scale_begins,
        "block": block,
        "n": n,
        "k": k,
        "SCALES": SCALES,
    }
    of_rows: dict[str, Any] = {
        "order": into.order,
        "owners": into.owners,
        "inverse": into.inverse,
        "share": share,
    }
    if pairs > TUNING.sort_pairs:
        _sort_chunks(of_pairs, of_begins, of_rows, filled)
        return
    sort_kernel[(max(1, -(-pairs // TUNING.sort_rows)),)](
        **of_pairs,
        **of_begins,
        **of_rows,
        room=into.order.shape[0],
        C=max(MIN_CHUNK, gpu.next_power_of_2(pairs)),
        ROWS=TUNING.sort_rows,
        FILLED=filled,
        num_warps=8,
    )


def _sort_chunks(
    of_pairs: dict[str, Any], of_begins: dict[str, Any], of_rows: dict[str, Any], filled: bool
) -> None:
    """The work of `sort_kernel` in three launches of several programs: count, prefix sum, place."""
    ids, padded, pdl = of_pairs["ids"], of_pairs["BP"], of_pairs["PDL"]
    chunk = TUNING.sort_chunk
    chunks = -(-of_pairs["pairs"] // chunk)
    counts = gpu.empty((chunks, padded), torch.int32, ids.device)
    order = of_rows["order"]
    count_kernel[(chunks,)](
        **of_pairs,
        counts=counts,
        order=order,
        room=order.shape[0],
        C=chunk,
        FILLED=filled,
        num_warps=4,
    )
    begins_kernel[(1,)](
        **of_begins,
        counts=counts,
        chunks=chunks,
        buckets=of_pairs["buckets"],
        T=max(1, TUNING.sort_counts // padded),
        BP=padded,
        PDL=pdl,
        num_warps=16,
    )
    place_kernel[(chunks,)](
        **of_pairs,
        **of_rows,
        counts=counts,
        begins=of_begins["begins"],
        block=of_begins["block"],
        C=chunk,
        STEP=TUNING.sort_step,
        num_warps=8,
    )
