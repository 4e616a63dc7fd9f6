"""Loads and stores of recurrent states in slots."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import FLOAT32, INDICES, expect, expect_within, refuse


def load(
    pool: Tensor | None,
    slots: Tensor | None,
    used: Tensor | None,
    count: int,
    shape: tuple[int, int, int],
    device: torch.device,
) -> Tensor:
    """A copy of states [count, *shape] float32.

    A sequence whose slot is negative, or whose `used` [count] is False, starts from zeros, whatever
    its slot holds: a reused slot may hold NaN.
    """
    if pool is None or not count:
        return torch.zeros((count, *shape), dtype=torch.float32, device=device)
    slot = torch.arange(count, device=device) if slots is None else slots.long()
    kept = slot >= 0 if used is None else (slot >= 0) & used
    held = pool[torch.where(kept, slot, 0)].float()
    return torch.where(kept[:, None, None, None], held, 0)


def store(pool: Tensor | None, slots: Tensor | None, state: Tensor) -> None:
    """Store states [N, ...] in their slots; those with negative slots are dropped."""
    if pool is None:
        return
    if slots is None:
        pool[: state.shape[0]] = state.to(pool.dtype)
        return
    kept = slots >= 0
    pool[slots[kept].long()] = state[kept].to(pool.dtype)


def expect_pool(
    op: str,
    names: tuple[str, str],
    pool: Tensor | None,
    slots: Tensor | None,
    count: int,
    shape: tuple[int, int, int],
    like: Tensor,
) -> None:
    """Raise BadArgument unless the pool is [slots, *shape] float32, or None, and slots [count] are
    in range."""
    if pool is not None:
        expect(op, names[0], pool, (None, *shape), FLOAT32, like)
    held = 0 if pool is None else pool.shape[0]
    if slots is not None:
        expect(op, names[1], slots, (count,), INDICES, like)
        if pool is not None:
            expect_within(op, names[1], slots, held, None)
    elif pool is not None and held < count:
        refuse(op, names[1], f"is None: {held} states are too few for {count} sequences")


def expect_used(op: str, used: Tensor | None, count: int, like: Tensor) -> None:
    """Raise BadArgument unless `has_initial_state` is [count] bool, or None."""
    if used is not None:
        expect(op, "has_initial_state", used, (count,), (torch.bool,), like)


def expect_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise BadArgument unless q, k are [B, T, H, K], v [B, T, n * H, V] and none of H, K, V 0."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    expect(op, "q", q, 4, floats)
    expect(op, "k", k, q.shape, floats, q)
    expect(op, "v", v, (*q.shape[:2], None, None), floats, q)
    heads, dim = q.shape[2:]
    if not heads or not dim:
        refuse(op, "q", f"has shape {list(q.shape)}, not [B, T, H, K] with H > 0 and K > 0")
    if not v.shape[2] or v.shape[2] % heads or not v.shape[3]:
        refuse(op, "v", f"has shape {list(v.shape)}, not [B, T, n * {heads}, V], as q has heads")
