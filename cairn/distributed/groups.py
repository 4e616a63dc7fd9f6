"""Ranks that hold one model together, and what they say to each other in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_AXES = 4
"""Of tensors whose shape one rank alone knows."""


Norm = tuple[Tensor, float] | None
"""Weight and eps of an rmsnorm."""


class FastSums(Protocol):
    """Sums over the ranks of one host without its process group, see `cairn.ops.PeerSums`."""

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` takes it."""

    def sum(self, x: Tensor, out: Tensor, add: bool = False) -> None:
        """out = the sum of the ranks' x, or out += it."""

    def takes_rows(self, residual: Tensor) -> bool:
        """Whether `add_normed` takes it."""

    def add_normed(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += the norm of the sum of the ranks' x."""

    def takes_parts(self, residual: Tensor) -> bool:
        """Whether `add_parts` takes it."""

    def add_parts(self, residual: Tensor, rows: Callable[[int, int], Tensor], norm: Norm) -> None:
        """residual += the sum of the ranks' rows begin .. end - 1, or its norm, part by part."""


class Group:
    """One rank among several; all of them make the same calls in the same order.

    Args:
        rank: its number.
        size: how many there are.
        ranks: a process group of torch.distributed; None where `size` is 1.
        here: number of the rank among those of its host, and how many these are; None: all are.

    Attributes:
        backend: the process group, of torch.distributed.
        fast: sums on GPUs of one host; None: the process group makes them.
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
        self.fast: FastSums | None = None

    @property
    def alone(self) -> bool:
        """There is no other rank."""
        return self.size == 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, with the same bits on all of them.

        On the CPU it is added in float32 and in the order of the ranks: what a token gets does not
        depend on the tokens beside it.
        """
        if self.alone:
            return x
        if x.is_cuda:
            x = x.contiguous()
            if self.fast is not None and self.fast.takes(x):
                out = torch.empty_like(x)
                self.fast.sum(x, out)
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
        """residual [T, H] += the sum of the ranks' product(x), or its norm, in place.

        Args:
            residual: contiguous.
            x: [T, K].
            product: gives [n, H] of some rows of x, each by itself.
            norm: the sum goes through it first.
        Returns:
            False: nothing was done, the process group must sum.
        """
        fast = self.fast if residual.is_contiguous() else None
        if fast is None:
            return False
        if norm is None and fast.takes(residual):
            fast.sum(product(x).contiguous(), residual, add=True)
        elif norm is not None and fast.takes_rows(residual):
            fast.add_normed(product(x).contiguous(), residual, *norm)
        elif len(x) and fast.takes_parts(residual):
            fast.add_parts(residual, lambda begin, end: product(x[begin:end]).contiguous(), norm)
        else:
            return False
        return True

    def gathered(self, x: Tensor) -> Tensor:
        """The ranks' x, one shape [..] and dtype, stacked: [ranks, ..]."""
        if self.alone:
            return x.unsqueeze(0)
        every = x.new_empty(self.size, *x.shape)
        if x.numel():
            self.backend._allgather_base(every.view(-1), x.reshape(-1)).wait()
        return every

    def of_rank(self, x: Tensor | None, rank: int, device: torch.device) -> Tensor:
        """A tensor that one rank has and whose shape the others, which give None, do not know."""
        about = [] if x is None else [DTYPES.index(x.dtype), *x.shape]
        head = torch.tensor([*about, *[-1] * (MOST_AXES + 1 - len(about))], device=device)
        self.backend.broadcast(head, rank).wait()
        if x is None:
            number, *shape = (size for size in head.tolist() if size >= 0)
            x = torch.empty(shape, dtype=DTYPES[number], device=device)
        x = x.contiguous()
        self.backend.broadcast(x, rank).wait()
        return x

    def of_first(self, x: Tensor) -> Tensor:
        """What rank 0 has, written to every other rank's x of the same shape and dtype."""
        if not self.alone and x.numel():
            self.backend.broadcast(x, 0).wait()
        return x

    def send(self, x: Tensor, rank: int) -> None:
        """Send a contiguous tensor to a rank, which receives it at this place of its calls."""
        self.backend.send([x.view(torch.uint8)], rank, 0).wait()

    def receive(self, x: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with what a rank sends."""
        self.backend.recv([x.view(torch.uint8)], rank, 0).wait()

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers."""
        every = self.gathered(torch.tensor(number, dtype=torch.int64, device=device))
        return int(every.min())


ALONE = Group()
"""The one rank of a model that is not divided."""
