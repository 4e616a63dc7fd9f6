"""What an op refuses before anything is launched: one error that names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from cairn.errors import BadArgument

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What models compute in."""
INDICES = (torch.int32, torch.int64)


def expect(
    op: str,
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    like: Tensor | None = None,
    dense: int = 0,
) -> None:
    """Raise BadArgument unless a tensor is what an op takes.

    Args:
        op, name: of the op and of its argument, for the message.
        tensor: the argument.
        shape: its sizes; None stands for any.
        dtypes: those allowed.
        like: a tensor whose device it must share.
        dense: last dims that must lie side by side; -1: all.
    """
    if shape is not None and not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        refuse(op, name, f"has shape {list(tensor.shape)}, not [{wanted}]")
    if dtypes is not None and tensor.dtype not in dtypes:
        allowed = " or ".join(_short(dtype) for dtype in dtypes)
        refuse(op, name, f"is {_short(tensor.dtype)}, not {allowed}")
    if like is not None and tensor.device != like.device:
        refuse(op, name, f"lies on {tensor.device}, other arguments on {like.device}")
    if dense and not _is_dense(tensor, dense):
        part = "it" if dense < 0 else f"its last {dense} dims" if dense > 1 else "its last dim"
        refuse(op, name, f"has strides {list(tensor.stride())}: {part} must be contiguous")


def refuse(op: str, name: str, problem: str, hint: str | None = None) -> NoReturn:
    """Raise BadArgument: "op: argument `name` problem. hint"."""
    raise BadArgument(f"{op}: argument `{name}` {problem}", hint)


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or own == size for own, size in zip(shape, wanted, strict=True)
    )


def _is_dense(tensor: Tensor, dims: int) -> bool:
    if dims < 0 or tensor.numel() == 0:
        return tensor.is_contiguous()
    step = 1
    for size, stride in list(zip(tensor.shape, tensor.stride(), strict=True))[::-1][:dims]:
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
