"""Dense attention by what torch brings along, for GPUs without Triton.

The tokens of a stretch see each other causally, as a square, and all slots before them; those go to
torch in blocks. Attention states of disjoint keys add up by their lse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cairn.ops.attention import launch, paging
from cairn.ops.attention.merge_states import merged
from cairn.ops.attention.tuning import TUNING
from cairn.ops.checks import FLOATS


def accepts(q: Tensor, stretches: Sequence[int] | None, mask_landmarks: bool) -> bool:
    """Whether torch's kernels take a call; arguments as in the op."""
    return bool(stretches) and not mask_landmarks and q.dtype in FLOATS and q.shape[2] % 8 == 0


def attend(task: launch.Task, stretches: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Dense attention of a task without a window; `stretches` as in the op, accepted before.

    Returns:
        (o [T, h_q, d] in q's dtype, lse [T, h_q] float32).
    """
    o, lse = task.empty(dtype=task.q.dtype)
    at = 0
    for row, first, tokens in zip(stretches[::3], stretches[1::3], stretches[2::3], strict=True):
        lines = slice(at, at + tokens)
        state = _part(task, lines, row, first, first + tokens, causal=True)
        for begin, end in _blocks(task, first):
            state = merged(*state, *_part(task, lines, row, begin, end, causal=False))
        o[lines], lse[lines] = state
        at += tokens
    return o, lse


def _blocks(task: launch.Task, end: int) -> Iterator[tuple[int, int]]:
    """Slots 0 .. end - 1 in blocks that start at a page."""
    size = task.k_cache.shape[2]
    page_bytes = task.q.element_size() * task.q.shape[1] * size * task.q.shape[2]
    width = size * max(1, TUNING.sdpa_block_bytes // page_bytes)
    return ((begin, min(begin + width, end)) for begin in range(0, end, width))


def _part(
    task: launch.Task, lines: slice, row: int, begin: int, end: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of some tokens over slots begin .. end - 1 of a row: o [n, h_q, d], lse [n, h_q].

    Args:
        causal: the tokens are those slots.
    """
    size = task.k_cache.shape[2]
    pages = task.page_table[row : row + 1, begin // size : -(-end // size)].long()
    seen = slice(begin % size, begin % size + end - begin)
    group = task.q.shape[1] // task.k_cache.shape[1]
    k, v = (
        paging.gather_pages(cache, pages)[:, :, seen].to(task.q.dtype).repeat_interleave(group, 1)
        for cache in (task.k_cache, task.v_cache)
    )
    o, lse = _attention(task.q[lines].transpose(0, 1).unsqueeze(0), k, v, causal, task.scale)
    return o[0].transpose(0, 1).float(), lse[0].T


def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """o [1, h, m, d] and lse [1, h, m] float32 of q [1, h, m, d] over k, v [1, h, n, d]."""
    if q.device.type == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return o, lse
    o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    # The kernel pads its lines.
    return o, lse[..., : q.shape[2]]
