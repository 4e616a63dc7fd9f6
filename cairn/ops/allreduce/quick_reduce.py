"""ROCm's quick reduce: an all-reduce whose traffic is quantised in blocks.

A rank rounds its tensor to integers with a scale for every 32 elements, max |x| / MOST[profile],
before it sends it; what the ranks receive is summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from cairn.ops.allreduce.custom_ar import dispose, object_at, refuse_handles, register
from cairn.ops.allreduce.symmetric import SymmetricAllReduce, sum_of_ranks
from cairn.ops.checks import FLOATS, expect, refuse

BLOCK = 32
MOST = {1: 127, 2: 31, 3: 7}
"""Profile -> the largest integer, of 8, 6 and 4 bits. Profile 0 does not round."""
MAX_BYTES = 1 << 31
"""Largest tensor, in bytes."""


def rounded(x: Tensor, profile: int) -> Tensor:
    """x as float32, rounded as other ranks receive it."""
    if profile == 0:
        return x.float()
    flat = x.float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True) / MOST[profile]
    codes = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (codes * scale).flatten()[: flat.numel()].view(x.shape)


def sum_of_rounded(tensors: Sequence[Tensor], profile: int) -> Tensor:
    """Reference implementation: the sum of the rounded tensors in rank order, rounded once."""
    total = sum_of_ranks([rounded(tensor, profile) for tensor in tensors])
    return total.to(tensors[0].dtype)


def init_custom_qr(rank: int, world_size: int, qr_max_size: int | None = None) -> int:
    """A handle of a quick reduce over the default process group.

    Args:
        rank, world_size: of this process, and of the group.
        qr_max_size: ignored.
    Raises:
        BadArgument: for another rank or size than the group has, or no process group.
    """
    return of_default_group("init_custom_qr", rank, world_size)


def of_default_group(op: str, rank: int, world_size: int) -> int:
    """A handle of the default process group. Raises BadArgument for another rank or size."""
    made = SymmetricAllReduce()
    for name, given, own in (
        ("world_size", world_size, made.ranks),
        ("rank", rank, torch.distributed.get_rank()),
    ):
        if given != own:
            refuse(op, name, f"is {given!r}, the default process group has {own}")
    return register(made)


def qr_get_handle(fa: int) -> NoReturn:
    """Refused: raw handles are not exchanged here. Raises BadArgument."""
    refuse_handles("qr_get_handle", "fa")


def qr_open_handles(fa: int, handles: Any) -> NoReturn:
    """Refused: raw handles are not opened here. Raises BadArgument."""
    refuse_handles("qr_open_handles", "handles")


def qr_all_reduce(
    fa: int, profile: int, inp: Tensor, out: Tensor, cast_bf2half: bool = False
) -> None:
    """out = the sum over all ranks of what each sends of inp.

    Args:
        fa: a handle of `init_custom_qr`.
        profile: 0: not rounded; 1, 2, 3: integers of 8, 6 and 4 bits.
        inp, out: alike, float32, bfloat16 or float16, contiguous.
        cast_bf2half: ignored.
    Raises:
        BadArgument: for an unknown handle or profile, or tensors that do not fit.
    """
    made = object_at("qr_all_reduce", fa)
    if profile not in (0, *MOST):
        refuse("qr_all_reduce", "profile", f"is {profile!r}, not 0, 1, 2 or 3")
    if profile == 0:
        made.all_reduce(inp, out)
        return
    expect("qr_all_reduce", "inp", inp, dtypes=FLOATS, dense=-1)
    expect("qr_all_reduce", "out", out, inp.shape, (inp.dtype,), inp, -1)
    wide = rounded(inp, profile).contiguous()
    made.all_reduce(wide, wide)
    out.copy_(wide)


def qr_destroy(fa: int) -> None:
    """Forget a handle. Raises BadArgument if it is unknown."""
    dispose(fa)


def qr_max_size() -> int:
    """Bytes of the largest tensor."""
    return MAX_BYTES
