"""Sums over the ranks of a process group, through torch's symmetric memory where it reaches all."""

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
"""Up to so many every rank reads all; measured on H200s."""
MOST_BYTES = 1 << 21
"""Of the shared buffer; larger tensors go through NCCL."""
ALIGNED = 16
"""Bytes that sizes are multiples of."""


def sum_of_ranks(tensors: Sequence[Tensor]) -> Tensor:
    """The definition: the sum of one tensor of each rank, in their order, in float32, rounded once.

    Args:
        tensors: alike in shape and dtype, one at least.
    """
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


class SymmetricAllReduce:
    """All-reduce of a process group, with one buffer that all ranks of a host can read.

    Small tensors are summed by torch's one-shot and two-shot kernels; what is larger, and groups
    whose memory is not shared, by the group's own all-reduce. Groups on CPUs gather, and add in the
    order of the ranks, so that every rank has the same bits. Every rank must make it, and call it
    with tensors of the same size. Calls can be captured in CUDA graphs.

    Args:
        group: of torch.distributed; None: the default one.
        most_bytes: of the buffer.

    Raises:
        BadArgument: there is no process group.
    """

    def __init__(self, group: Any = None, most_bytes: int = MOST_BYTES) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise BadArgument(
                "SymmetricAllReduce: there is no process group",
                "Call torch.distributed.init_process_group first",
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.ranks = dist.get_world_size(self.group)
        self.most_bytes = most_bytes
        self._buffer: Tensor | None = None
        if torch.cuda.is_available() and dist.get_backend(self.group) == "nccl":
            self._buffer = self._shared(most_bytes)

    def _shared(self, most_bytes: int) -> Tensor | None:
        """The buffer, in bytes; None where ranks do not reach each other's memory."""
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        try:
            buffer: Tensor = symmetric.empty(most_bytes, dtype=torch.uint8, device=device)
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
        elif self._buffer is None or size > self.most_bytes or size % ALIGNED:
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
    """What a process group, or an object of it, stands for. Raises BadArgument for raw handles."""
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
