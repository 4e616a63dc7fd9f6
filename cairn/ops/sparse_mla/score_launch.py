"""Launch of the lightning indexer's scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.quantization.codes import E4M3
from cairn.ops.sparse_mla import index_cache
from cairn.ops.sparse_mla.kernels.scores import scores_kernel
from cairn.ops.sparse_mla.tuning import TUNING

MAX_HEADS, MAX_DIM = 128, 256
"""Most heads, and largest head dim, that the kernel takes."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Index keys, paged or contiguous.

    Attributes:
        values: the keys; of a quantised cache, the cache viewed as e4m3.
        scales: their scales; None: all are 1.
        stride, scale_stride: elements from page to page, or from key to key.
        pages: number of pages.
        size: page size; 0: contiguous keys.
        preshuffled: the layout.
    """

    values: Tensor
    scales: Tensor | None
    stride: int
    scale_stride: int
    pages: int = 0
    size: int = 0
    preshuffled: bool = False

    @classmethod
    def of_cache(cls, cache: Tensor, dim: int, preshuffled: bool) -> Keys:
        """The keys of a paged cache."""
        size = index_cache.page_size(cache, dim)
        if not index_cache.is_quantized(cache):
            return cls(cache, None, cache.stride(0), 0, len(cache), size)
        scales = cache.view(torch.float32)[:, size * dim // 4 :]
        values = cache.view(E4M3)
        strides = (values.stride(0), scales.stride(0))
        return cls(values, scales, *strides, len(cache), size, preshuffled)


def words_fit(cache: Tensor, dim: int) -> bool:
    """Whether the scales of a quantised cache are aligned for float32."""
    size = index_cache.page_size(cache, dim)
    places = (cache.stride(0), cache.storage_offset(), size * dim, cache.shape[1])
    return all(place % 4 == 0 for place in places)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The range of keys visible to each token.

    Attributes:
        begin, end: [T] positions; begin None: 0.
        limit: upper bound of end.
        table, row: page table, and each token's row in it.
        least: tokens with at most this many visible keys get no scores.
        compact: column 0 is a token's first visible key.
    """

    begin: Tensor | None
    end: Tensor
    limit: int
    table: Tensor | None = None
    row: Tensor | None = None
    least: int = 0
    compact: bool = False


def score(
    q: Tensor, weights: Tensor, keys: Keys, visible: KeyRange, logits: Tensor, chunked: bool
) -> None:
    """Write logits [T, width]; see `scores_kernel`.

    Args:
        chunked: dozens of adjacent tokens share a row, as in a prefill.
    """
    (tokens, heads, dim), width = q.shape, logits.shape[1]
    if not tokens or not width or not keys.values.numel():
        return
    padded = max(16, gpu.next_power_of_2(heads))
    side = max(1, TUNING.chunk_columns // padded) if chunked else 1
    size, least = TUNING.score_keys, TUNING.min_score_tiles
    if side > 1:
        size, least = TUNING.chunk_keys, TUNING.min_chunk_tiles
    groups, tiles = -(-tokens // side), -(-width // size)
    enough = TUNING.min_score_programs // groups
    most = max(enough, min(TUNING.score_programs // groups, tiles // least))
    splits = max(1, min(tiles, most))
    single = q.dtype == torch.float32
    scores_kernel[(groups, splits)](
        q,
        weights=weights,
        keys=keys.values,
        scales=keys.scales,
        table=visible.table,
        rows=visible.row,
        begins=visible.begin,
        ends=visible.end,
        out=logits,
        tokens=tokens,
        limit=visible.limit,
        width=width,
        pages=keys.pages,
        least=visible.least,
        q_token=q.stride(0),
        page_stride=keys.stride,
        scale_stride=keys.scale_stride,
        table_stride=0 if visible.table is None else visible.table.stride(0),
        out_stride=logits.stride(0),
        HEADS=heads,
        HP=padded,
        DIM=dim,
        DP=max(16, gpu.next_power_of_2(dim)),
        SIZE=keys.size,
        TOKENS=side,
        KEYS=size,
        PRESHUFFLED=keys.preshuffled,
        COMPACT=visible.compact,
        PRECISION="ieee" if single else "tf32",
        num_warps=TUNING.score_warps,
        num_stages=TUNING.chunk_stages if side > 1 else TUNING.score_stages,
    )


def accepts(q: Tensor, weights: Tensor, logits: Tensor) -> bool:
    """Whether the kernel can read these queries and weights and write these scores."""
    dim = q.shape[2]
    near = q.stride(2) == 1 and q.stride(1) == dim and logits.stride(1) == 1
    floats = q.dtype != E4M3 or gpu.INTERPRETED or gpu.supports_e4m3(q.device)
    small = q.shape[1] <= MAX_HEADS and dim <= MAX_DIM
    return near and floats and small and weights.is_contiguous()
