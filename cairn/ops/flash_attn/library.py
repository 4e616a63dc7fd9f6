"""Flash attention by what torch brings along: on the CPU its flash kernel, a block of queries at a
time; on a GPU cuDNN, where whole sequences meet whole sequences."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cairn.ops.attention import tiles as tiling
from cairn.ops.checks import FLOATS
from cairn.ops.flash_attn.launch import Task
from cairn.ops.flash_attn.tuning import TUNING


@functools.cache
def _known(index: int) -> bool:
    """Whether cuDNN's attention was measured to be the faster one on such a device."""
    capability = torch.cuda.get_device_capability(index)
    return capability == (9, 0) and bool(torch.backends.cudnn.is_available())


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
    # Only queries in front see nothing.
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
            *(query.unsqueeze(0), k[keys].transpose(0, 1).unsqueeze(0)),
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


def whole(task: Task) -> bool:
    """Whether all sequences are as long as their tensors say, and cuDNN is known to be fast."""
    partial = (task.page_table, task.batch_idx, task.leftpad, task.seqused_q, task.seqused_k)
    # One ragged sequence too may begin behind its tensor's first line, or end before the last.
    ragged = (task.cu_seqlens_q, task.cu_seqlens_k)
    queries, keys = task.q.shape[-3], task.k.shape[-3]
    return (
        task.q.device.type == "cuda"
        and all(x is None for x in (*partial, *ragged))
        and task.sinks is None
        and plain(task)
        and task.q.dtype != torch.float32
        and task.left < 0
        and task.chunk == 0
        and (task.right < 0 or (task.right == 0 and queries == keys))
        and queries >= TUNING.library_least
        and task.q.shape[-1] <= 128
        and task.q.shape[-1] % 8 == 0
        and _known(task.q.device.index)
    )


def outrun(task: Task) -> bool:
    """Whether tensor cores that work in groups (`group_launch`) were measured to be faster than
    cuDNN: where a key is seen by later queries alone, and these are neither few nor very many."""
    return (
        task.right == 0
        and 2 * TUNING.library_least <= task.max_seqlen_q <= 8 * TUNING.library_least
    )


def attend_whole(task: Task) -> None:
    """Write o and lse of a task that is `whole`, by cuDNN."""
    q, k, v = (x.transpose(1, 2) for x in (task.q, task.k, task.v))
    o, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, task.right == 0, False, scale=task.scale
    )[:2]
    task.o.copy_(o.transpose(1, 2))
    task.lse.copy_(lse.reshape(task.lse.shape))
