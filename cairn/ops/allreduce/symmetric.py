"""All-reduce over a process group, in torch's symmetric memory where all ranks can map it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops.checks import FLOATS, expect, refuse

log = logging.getLogger(__name__)

ONE_SHOT_BYTES = 1 << 18
"""Largest tensor that is reduced in one shot: every rank reads all ranks' copies. Larger ones take
two: each rank reduces a part, then all gather. Measured on H200s."""
MAX_BYTES = 1 << 21
"""Size of the shared buffer; larger tensors go through NCCL."""
ALIGNED = 16
"""torch's kernels need sizes that are multiples of this many bytes."""


def sum_of_ranks(tensors: Sequence[Tensor]) -> Tensor:
    """Reference implementation: the sum of the ranks' tensors in rank order, in float32, rounded
    once.

    Args:
        tensors: alike in shape and dtype, one at least.
    """
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


class SymmetricAllReduce:
    """All-reduce of a process group through one buffer that all ranks of a host map.

    Tensors that fit the buffer are reduced by torch's one-shot and two-shot kernels; larger ones,
    and all tensors of groups that cannot share memory, by the group's own all-reduce. Groups on
    CPUs gather and add in the order of the ranks, so every rank gets the same bits. All ranks must
    create it, and call it with tensors of the same size. Calls can be captured in CUDA graphs.

    Args:
        group: a torch.distributed process group; None: the default one.
        max_bytes: size of the buffer.

    Raises:
        BadArgument: there is no process group.
    """

    def __init__(self, group: Any = None, max_bytes: int = MAX_BYTES) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise BadArgument(
                "SymmetricAllReduce: there is no process group",
                "Call torch.distributed.init_process_group first",
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.ranks = dist.get_world_size(self.group)
        self.max_bytes = max_bytes
        self._buffer: Tensor | None = None
        if torch.cuda.is_available() and dist.get_backend(self.group) == "nccl":
            self._buffer = self._shared(max_bytes)

    def _shared(self, max_bytes: int) -> Tensor | None:
        """The buffer [max_bytes] uint8; None where ranks cannot map each other's memory."""
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        try:
            buffer: Tensor = symmetric.empty(max_bytes, dtype=torch.uint8, device=device)
            symmetric.rendezvous(buffer, self.group)
        except RuntimeError as error:
            log.info("no symmetric memory, sums go through NCCL: %s", error)
            return None
        return buffer

    def all_reduce(self, inp: Tensor, out: Tensor) -> None:
        """out = the sum over all ranks of inp, which may be out itself.

        Args:
            inp: float32, bfloat16 or float16, contiguous.
            out: the same shape and dtype, contiguous, written.
        Raises:
            BadArgument: for another shape, dtype, device or layout.
        """
        expect("all_reduce", "inp", inp, dtypes=FLOATS, dense=-1)
        expect("all_reduce", "out", out, inp.shape, (inp.dtype,), inp, -1)
        size = inp.nbytes
        if not inp.is_cuda:
            out.copy_(sum_of_ranks(self._gathered(inp)))
        elif self._buffer is None or size > self.max_bytes or size % ALIGNED:
            self._by_group(inp, out)
        else:
            self._by_memory(inp, out, self._buffer[:size].view(inp.dtype))

    def _gathered(self, inp: Tensor) -> list[Tensor]:
        import torch.distributed as dist

        parts = [torch.empty_like(inp) for _ in range(self.ranks)]
        dist.all_gather(parts, inp, group=self.group)
        return parts

    def _by_group(self, inp: Tensor, out: Tensor) -> None:
        import torch.distributed as dist

        if out.data_ptr() != inp.data_ptr():
            out.copy_(inp)
        dist.all_reduce(out, group=self.group)

    def _by_memory(self, inp: Tensor, out: Tensor, shared: Tensor) -> None:
        name = self.group.group_name
        shared.copy_(inp.view(-1))
        if inp.nbytes <= ONE_SHOT_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", name, out.view(-1))
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
            out.view(-1).copy_(shared)


def object_of(op: str, name: str, value: Any) -> SymmetricAllReduce:
    """The all-reduce of a process group, or `value` if it is one. Raises BadArgument for raw
    handles."""
    import torch.distributed as dist

    if isinstance(value, SymmetricAllReduce):
        return value
    if value is not None and not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        refuse(
            op,
            name,
            f"is {type(value).__name__}: raw addresses of other processes are not opened here",
            "Give a torch.distributed process group, None for the default one, or a "
            "cairn.ops.SymmetricAllReduce",
        )
    return SymmetricAllReduce(value)
