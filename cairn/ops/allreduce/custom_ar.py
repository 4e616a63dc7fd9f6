"""sgl-kernel's names of custom all-reduce, over `SymmetricAllReduce`.

A handle is an index into a table of objects. Addresses of other processes' memory, which
sgl-kernel's callers exchange, are refused: torch's symmetric memory exchanges its own.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import torch
from torch import Tensor

from cairn.ops.allreduce.symmetric import SymmetricAllReduce, object_of
from cairn.ops.checks import check_min, refuse

META_BYTES = 16
"""Size of the signal buffer that callers may allocate; it is not used."""
_objects: dict[int, SymmetricAllReduce] = {}
_numbers = itertools.count(1)


def init_custom_ar(ipc_tensors: Any, rank_data: Any, rank: int, full_nvlink: bool) -> int:
    """A handle of an all-reduce over a process group.

    Args:
        ipc_tensors: the process group, None for the default one, or a `SymmetricAllReduce`.
        rank_data, full_nvlink: ignored.
        rank: of this process in the group.
    Raises:
        BadArgument: for raw addresses, another rank than this process has, or no process group.
    """
    name = "init_custom_ar"
    made = object_of(name, "ipc_tensors", ipc_tensors)
    own = torch.distributed.get_rank(made.group)
    if rank != own:
        refuse(name, "rank", f"is {rank!r}, this process is rank {own}")
    return register(made)


def register(made: SymmetricAllReduce) -> int:
    """A handle of an object."""
    handle = next(_numbers)
    _objects[handle] = made
    return handle


def object_at(op: str, handle: int, name: str = "fa") -> SymmetricAllReduce:
    """The object of a handle. Raises BadArgument if there is none."""
    found = _objects.get(handle) if isinstance(handle, int) else None
    if found is None:
        refuse(op, name, f"is {handle!r}, not a handle of an all-reduce")
    return found


def all_reduce(
    fa: int, inp: Tensor, out: Tensor, reg_buffer: int = 0, reg_buffer_sz_bytes: int = 0
) -> None:
    """out = the sum over all ranks of inp; see `SymmetricAllReduce`.

    Args:
        fa: a handle of `init_custom_ar`.
        inp, out: alike, float32, bfloat16 or float16, contiguous.
        reg_buffer, reg_buffer_sz_bytes: ignored.
    Raises:
        BadArgument: for an unknown handle, or tensors that do not fit.
    """
    object_at("all_reduce", fa).all_reduce(inp, out)


def dispose(fa: int) -> None:
    """Forget a handle. Raises BadArgument if it is unknown."""
    object_at("dispose", fa)
    del _objects[fa]


def meta_size() -> int:
    """Bytes of a signal buffer that callers may allocate."""
    return META_BYTES


def register_buffer(fa: int, fake_ipc_ptrs: Any) -> None:
    """Without effect: every tensor can be summed. Raises BadArgument for an unknown handle."""
    object_at("register_buffer", fa)


def get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """No handles and no offsets: graphs need none. Raises BadArgument for an unknown handle."""
    object_at("get_graph_buffer_ipc_meta", fa)
    return [], []


def register_graph_buffers(fa: int, handles: Any, offsets: Any) -> None:
    """Without effect: graphs need no addresses of others. Raises BadArgument for an unknown
    handle."""
    object_at("register_graph_buffers", fa)


def all_reduce_reg(fa: int, inp: Tensor, out: Tensor) -> None:
    """`all_reduce`, under ROCm's name for registered buffers."""
    object_at("all_reduce_reg", fa).all_reduce(inp, out)


def all_reduce_unreg(fa: int, inp: Tensor, reg_buffer: Any, out: Tensor) -> None:
    """`all_reduce`, under ROCm's name for unregistered buffers; reg_buffer: ignored."""
    object_at("all_reduce_unreg", fa).all_reduce(inp, out)


def deterministic_all_reduce_reg(fa: int, inp: Tensor, out: Tensor) -> None:
    """`all_reduce`, which gives the same bits on all ranks."""
    object_at("deterministic_all_reduce_reg", fa).all_reduce(inp, out)


def deterministic_all_reduce_unreg(fa: int, inp: Tensor, reg_buffer: Any, out: Tensor) -> None:
    """`all_reduce`, which gives the same bits on all ranks; reg_buffer: ignored."""
    object_at("deterministic_all_reduce_unreg", fa).all_reduce(inp, out)


def allocate_meta_buffer(size: int) -> Tensor:
    """Zeros [size] uint8, on the GPU if there is one. Raises BadArgument for a negative size."""
    check_min("allocate_meta_buffer", "size", size, 0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.zeros(size, dtype=torch.uint8, device=device)


def get_meta_buffer_ipc_handle(inp: Tensor) -> NoReturn:
    """Refused: raw handles are not exchanged here. Raises BadArgument."""
    refuse_handles("get_meta_buffer_ipc_handle", "inp")


def refuse_handles(op: str, name: str) -> NoReturn:
    """Raise BadArgument: the op only makes sense for raw addresses."""
    hint = "Use cairn.ops.SymmetricAllReduce, which exchanges them itself"
    refuse(op, name, "is memory whose raw handle other processes would open", hint)
