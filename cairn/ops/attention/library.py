"""Dense attention of a long prompt's chunk, its past by cuDNN.

A chunk sees two kinds of keys: those before it, all of them, and its own, causally. The first are
most of the work, need no mask and can be cut anywhere. They go to cuDNN in blocks of a few fixed
sizes, because it plans anew for every size it has not met; what is left over goes to the tiles.
Attention states of disjoint keys add up by their lse.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import launch
from cairn.ops.attention.kernels import join_kernel

QUERIES = 4224
"""Tokens of a call: a quarter of the chunk that the engine runs by default on a GPU."""
KEYS = (8 * QUERIES, 2 * QUERIES)
"""Slots of a call, the first that fits; whole pages of 128 slots and less."""
GATHERED_BYTES = 160 << 20
"""Most bytes of keys and values that lie side by side for a call."""
_JOINED = 4096


@functools.cache
def known(index: int) -> bool:
    """Whether cuDNN's attention was measured to be the faster one on such a device."""
    capability = torch.cuda.get_device_capability(index)
    return capability == (9, 0) and bool(torch.backends.cudnn.is_available())


def accepts(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, first_slot: int | None, mask_landmarks: bool
) -> bool:
    """Whether the tokens fill a call and have a past that does; `first_slot` as in the op."""
    return (
        q.device.type == "cuda"
        and first_slot is not None
        and first_slot >= KEYS[-1]
        and q.shape[0] >= QUERIES
        and not mask_landmarks
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k_cache.dtype == v_cache.dtype
        and q.shape[2] <= 128
        and q.shape[2] % 8 == 0
        and k_cache.shape[2] <= KEYS[-1]
        and KEYS[-1] % k_cache.shape[2] == 0
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and launch.accepts(q, k_cache, v_cache)
        and known(q.device.index)
    )


def attend(task: launch.Task, first_slot: int) -> tuple[Tensor, Tensor]:
    """Dense attention of consecutive slots of one row.

    Args:
        task: of the tokens, without a window.
        first_slot: slot of the first token.
    Returns:
        (o [T, h_q, d], lse [T, h_q]) float32.
    """
    tokens = task.q.shape[0]
    filled = tokens // QUERIES * QUERIES
    past = first_slot // KEYS[-1] * KEYS[-1]
    o, lse = task.empty()
    launch.run_tiles(task.part(slice(0, filled)), o[:filled], lse[:filled], past)
    if filled < tokens:
        launch.run_tiles(task.part(slice(filled, tokens)), o[filled:], lse[filled:])
    begin = 0
    while begin < past:
        keys = _size(task, past - begin)
        k, v = (_gathered(task, cache, begin, keys) for cache in (task.k_cache, task.v_cache))
        for at in range(0, filled, QUERIES):
            _add(task, slice(at, at + QUERIES), k, v, o, lse)
        begin += keys
    return o, lse


def _size(task: launch.Task, left: int) -> int:
    """Slots of the next call."""
    slot_bytes = 2 * task.q.element_size() * task.k_cache.shape[1] * task.q.shape[2]
    fitting = (n for n in KEYS[:-1] if n <= left and n * slot_bytes <= GATHERED_BYTES)
    return next(fitting, KEYS[-1])


def _gathered(task: launch.Task, cache: Tensor, begin: int, count: int) -> Tensor:
    """Slots begin .. begin + count - 1 of the row, side by side: [1, h_kv, count, d]."""
    _, heads, size, dim = cache.shape
    span = slice(begin // size, (begin + count) // size)
    pages = task.page_table.index_select(0, task.row[:1])[:, span]
    lines = pages * heads + torch.arange(heads, device=cache.device, dtype=pages.dtype)[:, None]
    return cache.view(-1, size * dim).index_select(0, lines.view(-1)).view(1, heads, count, dim)


def _add(task: launch.Task, at: slice, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
    """Add what the tokens `at` see in k, v [1, h_kv, n, d] to their states in o and lse."""
    query = task.q[at].transpose(0, 1).unsqueeze(0)
    part, part_lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, k, v, None, True, 0.0, False, False, scale=task.scale
    )[:2]
    tokens, heads, dim = task.q[at].shape
    width = max(16, gpu.next_power_of_2(dim))
    rows = _JOINED // width
    part = part[0].transpose(0, 1)
    join_kernel[(-(-tokens * heads // rows),)](
        *(o[at], lse[at], part, part_lse, tokens, *part.stride()[:2]),
        *(heads, dim, width, rows),
        num_warps=4,
    )
