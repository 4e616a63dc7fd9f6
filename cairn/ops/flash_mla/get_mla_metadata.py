"""FlashMLA's scheduling metadata. These kernels do not need it: they read lengths on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import INDICES, check_min, expect

NAME = "get_mla_metadata"
NUMBERS = 8
"""Integers per SM part in FlashMLA's metadata."""


def get_mla_metadata(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Tensors for `tile_scheduler_metadata` and `num_splits` of `flash_mla_with_kvcache`, which
    ignores them. They do not depend on the lengths, so a CUDA graph that captured them can be
    replayed with other lengths.

    Args:
        cache_seqlens: [B] int32 or int64.
        num_q_tokens_per_head_k, num_heads_k: > 0; otherwise ignored.
        num_heads_q, is_fp8_kvcache, topk: ignored.
    Returns:
        (int32 [1, 8], int32 [B + 1]: 0, 1, 2, ...).
    Raises:
        BadArgument: for another shape or dtype, or a count below 1.
    """
    expect(NAME, "cache_seqlens", cache_seqlens, 1, INDICES)
    check_min(NAME, "num_q_tokens_per_head_k", num_q_tokens_per_head_k, 1)
    check_min(NAME, "num_heads_k", num_heads_k, 1)
    device = cache_seqlens.device
    parts = torch.zeros((1, NUMBERS), dtype=torch.int32, device=device)
    return parts, torch.arange(len(cache_seqlens) + 1, dtype=torch.int32, device=device)
