"""Prefill of one row's consecutive tokens by the flash attention kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.flash_attn import wgmma_launch
from cairn.ops.flash_attn.launch import Task


def fits(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    scale: float | None,
    segments: Sequence[int] | None,
) -> bool:
    """Whether `attend` supports a call of `dense_attention` without mask_landmarks."""
    if segments is None or len(segments) != 3 or k_cache.dtype != q.dtype:
        return False
    # `fits` does not read the results.
    return wgmma_launch.fits(_task((q, k_cache, v_cache, q, q), page_table, scale, segments))


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    scale: float | None,
    segments: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """o [T, h_q, d] in q's dtype and lse [T, h_q] float32, of a call that `fits`."""
    o = gpu.empty(q.shape, q.dtype, q.device)
    lse = gpu.empty(q.shape[:2], torch.float32, q.device)
    task = _task((q, k_cache, v_cache, o, lse), page_table, scale, segments)
    wgmma_launch.attend(task, length=segments[1] + segments[2])
    return o, lse


def _task(
    tensors: tuple[Tensor, ...], page_table: Tensor, scale: float | None, segments: Sequence[int]
) -> Task:
    """The one sequence: causal, its queries the last of its slots.

    Args:
        tensors: q [T, h_q, d], the caches [pages, h_kv, S, d], o as q, lse [T, h_q].
    """
    q, k_cache, v_cache, o, lse = tensors
    row, first, count = segments
    pages = -(-(first + count) // k_cache.shape[2])
    factor = q.shape[2] ** -0.5 if scale is None else scale
    return Task(
        q=q.unsqueeze(0),
        k=k_cache.transpose(1, 2),
        v=v_cache.transpose(1, 2),
        o=o.unsqueeze(0),
        lse=lse.transpose(0, 1).unsqueeze(0),
        page_table=page_table[row : row + 1, :pages],
        scale=factor,
        right=0,
        max_seqlen_q=count,
    )
