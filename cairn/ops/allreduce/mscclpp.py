"""sgl-kernel's names of all-reduce by MSCCL++, over the default process group (NCCL)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cairn.ops.allreduce.custom_ar import object_at
from cairn.ops.allreduce.quick_reduce import of_default_group

ID_BYTES = 128
"""Size of a unique id."""


def mscclpp_generate_unique_id() -> Tensor:
    """Zeros [128] uint8: torch.distributed has found the processes already."""
    return torch.zeros(ID_BYTES, dtype=torch.uint8)


def mscclpp_init_context(
    unique_id: Any,
    rank: int,
    world_size: int,
    scratch: Any,
    put_buffer: Any,
    nranks_per_node: int,
    rank_to_node: Any,
    rank_to_ib: Any,
    context_selection: int,
) -> int:
    """A handle of the default process group.

    Args:
        rank, world_size: of this process, and of the group.
        unique_id, scratch, put_buffer, nranks_per_node, rank_to_node, rank_to_ib,
        context_selection: ignored.
    Raises:
        BadArgument: for another rank or size than the group has, or no process group.
    """
    return of_default_group("mscclpp_init_context", rank, world_size)


def mscclpp_allreduce(context: int, inp: Tensor, out: Tensor, nthreads: int, nblocks: int) -> None:
    """out = the sum over all ranks of inp.

    Args:
        context: a handle of `mscclpp_init_context`.
        inp, out: alike, float32, bfloat16 or float16, contiguous.
        nthreads, nblocks: ignored.
    Raises:
        BadArgument: for an unknown handle, or tensors that do not fit.
    """
    object_at("mscclpp_allreduce", context, "context").all_reduce(inp, out)
