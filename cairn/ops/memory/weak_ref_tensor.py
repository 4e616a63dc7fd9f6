"""A tensor over memory that it does not own."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor

from cairn.ops.checks import refuse
from cairn.ops.graph_break import with_graph_break
from cairn.ops.memory.addresses import tensor_at

T = TypeVar("T")


def weak_ref_tensor(tensor: T) -> T:
    """A tensor of the same memory, shape, strides and dtype that does not keep the memory.

    What a CUDA graph wrote into its pool can so be read after the graph's tensors are gone, as
    long as the pool lives. Reading it after the memory was freed is undefined. It is no registered
    op: torch.compile breaks the graph here, for the result aliases the argument.

    Args:
        tensor: on the CPU or a CUDA device, with storage. Anything but a tensor, as lists of
            arguments hold it, is given back as it is.
    Raises:
        BadArgument: for a tensor without memory of its own (meta, fake or sparse), or a lazy
            conjugate or negative of what is there.
    """
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        refuse("weak_ref_tensor", "tensor", f"is {tensor.layout} on {tensor.device.type}")
    if tensor.is_conj() or tensor.is_neg():
        refuse("weak_ref_tensor", "tensor", "is not what its memory holds", "Resolve it first")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        refuse("weak_ref_tensor", "tensor", f"is a {type(tensor).__name__}")
    return cast(T, with_graph_break(_over_the_same, tensor.detach()))


def _over_the_same(tensor: Tensor) -> Tensor:
    own = (tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
    return tensor_at(tensor.data_ptr(), *own)
