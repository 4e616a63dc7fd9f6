"""A tensor over memory that it does not own."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import refuse
from cairn.ops.memory.addresses import tensor_at


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """A tensor of the same memory, shape, strides and dtype that does not keep the memory.

    What a CUDA graph wrote into its pool can so be read after the graph's tensors are gone, as
    long as the pool lives. Reading it after the memory was freed is undefined. It is no registered
    op: torch.compile breaks the graph here, for the result aliases the argument.

    Args:
        tensor: on the CPU or a CUDA device, with storage.
    Raises:
        BadArgument: for a tensor without memory of its own (meta, fake or sparse).
    """
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        refuse("weak_ref_tensor", "tensor", f"is {tensor.layout} on {tensor.device.type}")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        refuse("weak_ref_tensor", "tensor", f"is a {type(tensor).__name__}")
    found: Tensor = torch.compiler.disable(_over_the_same)(tensor.detach())
    return found


def _over_the_same(tensor: Tensor) -> Tensor:
    own = (tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
    return tensor_at(tensor.data_ptr(), *own)
