"""Flash attention on the CPU by torch's own flash kernel, a block of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.attention import tiles as tiling
from cairn.ops.checks import FLOATS
from cairn.ops.flash_attn.launch import Task
from cairn.ops.flash_attn.tuning import TUNING


def plain(task: Task) -> bool:
    """Whether scores are plain products, of heads as wide as the values."""
    extra = (task.qv, task.q_descale, task.k_descale, task.v_descale)
    return (
        all(x is None for x in extra)
        and task.softcap <= 0
        and task.q.dtype in FLOATS
        and task.k.shape[-1] == task.v.shape[-1]
    )


def attend_sequence(task: Task, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one sequence on the CPU, masks and sinks as in the task.

    Args:
        q: [m, H, d]; k, v: [n, Hk, d].
    Returns:
        (o [m, H, d] in q's dtype, lse [H, m] float32).
    """
    many, heads, dim = q.shape
    kv_heads = k.shape[1]
    o = torch.zeros_like(q)
    lse = torch.full((heads, many), torch.inf, dtype=torch.float32, device=q.device)
    first, last = _seen(many, len(k), task)
    # Queries without any key are the first ones; skip them.
    for at in range(int((last < first).sum()), many, TUNING.library_queries):
        lines = slice(at, min(many, at + TUNING.library_queries))
        keys = slice(int(first[lines.start]), int(last[lines.stop - 1]) + 1)
        key = torch.arange(keys.start, keys.stop, device=q.device)
        hidden = (key < first[lines].unsqueeze(1)) | (key > last[lines].unsqueeze(1))
        mask = None
        if bool(hidden.any()):
            mask = tiling.additive(hidden, q.dtype).repeat_interleave(heads // kv_heads, 0)
            mask = mask.expand(1, kv_heads, *mask.shape)
        query = q[lines].unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        part, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.unsqueeze(0),
            k[keys].transpose(0, 1).unsqueeze(0),
            v[keys].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=task.scale,
        )
        count = lines.stop - lines.start
        part = part.view(kv_heads, count, -1, dim).transpose(0, 1).flatten(1, 2)
        log = logs.view(kv_heads, count, -1).transpose(1, 2).flatten(0, 1)
        if task.sinks is not None:
            part = part * torch.sigmoid(log - task.sinks.float().unsqueeze(1)).T.unsqueeze(-1)
        o[lines], lse[:, lines] = part.to(q.dtype), log.float()
    return o, lse


def _seen(queries: int, keys: int, task: Task) -> tuple[Tensor, Tensor]:
    """First and last key of every query, neither falling; last < first: none."""
    place = torch.arange(queries, device=task.q.device) + keys - queries
    first = torch.zeros_like(place) if task.left < 0 else (place - task.left).clamp(min=0)
    last = torch.full_like(place, keys - 1)
    if task.right >= 0:
        last = (place + task.right).clamp(max=keys - 1)
    if task.chunk:
        block = torch.div(place, task.chunk, rounding_mode="floor") * task.chunk
        first, last = torch.maximum(first, block), torch.minimum(last, block + task.chunk - 1)
    return first, last
