"""The group of ranks that share one model, and its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from cairn.errors import InvariantError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_AXES = 4
"""Most dimensions of a tensor that `Group.of_rank` broadcasts."""
Norm = tuple[Tensor, float] | None
"""Weight and eps of an rmsnorm."""


class PeerCollectives(Protocol):
    """Collectives through peer-to-peer GPU memory: see `cairn.ops.allreduce.peers.PeerSums`.

    Each `takes...` says whether a tensor has a size and layout that the collective supports.
    """

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` supports it."""

    def sum(self, x: Tensor, out: Tensor, add: bool = False) -> None:
        """out = sum of x over the ranks, or out += that sum."""

    def takes_gathered(self, x: Tensor) -> bool:
        """Whether `gather` supports it."""

    def gather(self, x: Tensor, out: Tensor) -> None:
        """out [ranks, ..] = x of every rank."""

    def takes_rows(self, residual: Tensor) -> bool:
        """Whether `add_normed` supports it."""

    def add_normed(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += rmsnorm(sum of x over the ranks)."""

    def takes_parts(self, residual: Tensor) -> bool:
        """Whether `add_parts` supports it."""

    def add_parts(self, residual: Tensor, rows: Callable[[int, int], Tensor], norm: Norm) -> None:
        """residual += sum of rows(0, T) over the ranks, or its norm, in chunks of rows."""


class Group:
    """A rank's view of its group. Every rank makes the same calls in the same order.

    Args:
        rank: number of this rank.
        size: number of ranks.
        ranks: NCCL or gloo process group of torch.distributed; None where `size` is 1.
        here: (local rank, ranks on this host); None: all ranks are on this host.

    Attributes:
        backend: the process group.
        peers: collectives through peer memory; None: the process group does them all.
        checks: `expect_equal` compares.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        ranks: Any = None,
        here: tuple[int, int] | None = None,
    ) -> None:
        self.rank, self.size, self.backend = rank, size, ranks
        self.local, self.size_here = here or (rank, size)
        self.peers: PeerCollectives | None = None
        self.checks = False

    @property
    def alone(self) -> bool:
        """Whether the group has one rank only."""
        return self.size == 1

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum of x over the ranks, bit-identical on all of them.

        On the CPU and through peer memory the sum is in float32 and in rank order, so the result
        for a token does not depend on other tokens. NCCL may use the memory of x.
        """
        if self.alone:
            return x
        if x.is_cuda:
            x = x.contiguous()
            if self.peers is not None and self.peers.takes(x):
                out = torch.empty_like(x)
                self.peers.sum(x, out)
                return out
            self.backend.allreduce([x]).wait()
            return x
        first, *others = self.gathered(x).unbind()
        total = first.float()
        for other in others:
            total = total + other.float()
        return total.to(x.dtype)

    def add_product(
        self,
        residual: Tensor,
        x: Tensor,
        product: Callable[[Tensor], Tensor],
        norm: Norm = None,
    ) -> bool:
        """residual [T, H] += sum over the ranks of product(x), or the norm of that sum, in place.

        Args:
            residual: contiguous.
            x: [T, K].
            product: maps rows [n, K] to [n, H]; rows are independent.
            norm: applied to the sum before it is added.
        Returns:
            False where peer memory does not support it: nothing was computed.
        """
        peers = self.peers if residual.is_contiguous() else None
        if peers is None:
            return False
        if norm is None and peers.takes(residual):
            peers.sum(product(x).contiguous(), residual, add=True)
        elif norm is not None and peers.takes_rows(residual):
            peers.add_normed(product(x).contiguous(), residual, *norm)
        elif len(x) and peers.takes_parts(residual):
            peers.add_parts(residual, lambda begin, end: product(x[begin:end]).contiguous(), norm)
        else:
            return False
        return True

    def gathered(self, x: Tensor) -> Tensor:
        """All-gather: x of every rank, same shape [..] and dtype, stacked as [ranks, ..]."""
        if self.alone:
            return x.unsqueeze(0)
        every = x.new_empty(self.size, *x.shape)
        if x.is_cuda and self.peers is not None and self.peers.takes_gathered(x):
            self.peers.gather(x.contiguous(), every)
        elif x.numel():
            self.backend._allgather_base(every.view(-1), x.reshape(-1)).wait()
        return every

    def of_rank(self, x: Tensor | None, rank: int, device: torch.device) -> Tensor:
        """Broadcast x from a rank; the others pass None and need not know its shape and dtype."""
        about = [] if x is None else [DTYPES.index(x.dtype), *x.shape]
        head = torch.tensor([*about, *[-1] * (MAX_AXES + 1 - len(about))], device=device)
        self.backend.broadcast(head, rank).wait()
        if x is None:
            number, *shape = (size for size in head.tolist() if size >= 0)
            x = torch.empty(shape, dtype=DTYPES[number], device=device)
        x = x.contiguous()
        self.backend.broadcast(x, rank).wait()
        return x

    def of_first(self, x: Tensor) -> Tensor:
        """Broadcast x from rank 0, in place; same shape and dtype on all ranks."""
        if not self.alone and x.numel():
            self.backend.broadcast(x, 0).wait()
        return x

    def expect_equal(self, what: str, x: Tensor) -> None:
        """With `checks`, raise InvariantError unless x has the same bits on all ranks. A CUDA graph
        does not wait for the comparison and has none."""
        if not self.checks or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        words = x.contiguous().view(torch.uint8).flatten().long()
        # Sums of bytes times odd numbers, modulo 2^64.
        factors = torch.arange(len(words), device=x.device) * 2654435761 * 2 + 1
        every = self.gathered((words * factors).sum()).tolist()
        if len(set(every)) > 1:
            raise InvariantError(f"{what} {list(x.shape)} differ between ranks: {every}")

    def send(self, x: Tensor, rank: int) -> None:
        """Send a contiguous tensor to a rank, which calls `receive` at the same point."""
        self.backend.send([x.view(torch.uint8)], rank, 0).wait()

    def receive(self, x: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with the one that a rank sends."""
        self.backend.recv([x.view(torch.uint8)], rank, 0).wait()

    def least(self, number: int, device: torch.device) -> int:
        """The minimum of the ranks' numbers."""
        every = self.gathered(torch.tensor(number, dtype=torch.int64, device=device))
        return int(every.min())


ALONE = Group()
"""The group of a model on one rank."""
