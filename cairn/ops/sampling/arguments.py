"""Argument checks, and conversion of parameters to tensors, shared by samplers and filters."""

from __future__ import annotations

import reprlib

import torch
from torch import Tensor

from cairn.ops.checks import FLOAT32, FLOATS, INDICES, expect, expect_within, refuse


def check_rows(op: str, name: str, rows: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise BadArgument unless rows are [B, V] with V > 0."""
    expect(op, name, rows, 2, dtypes)
    if rows.shape[1] == 0:
        refuse(op, name, f"has shape {list(rows.shape)}, not [B, V] with V > 0")


def check_parameter(
    op: str, name: str, parameter: Tensor, rows: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise BadArgument unless a parameter is [B], one value per row of `rows` [B, V]."""
    expect(op, name, parameter, rows.shape[:1], dtypes, like=rows)


def check_indices(op: str, indices: Tensor, rows: Tensor) -> None:
    """Raise BadArgument unless indices are [N] and in range for `rows` [B, V]."""
    expect(op, "indices", indices, (None,), INDICES, like=rows)
    expect_within(op, "indices", indices, len(rows))


def check_filters(
    op: str,
    rows: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None = None,
) -> None:
    """`check_parameter` for the filters that are not None."""
    if top_k is not None:
        check_parameter(op, "top_k", top_k, rows, INDICES)
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if share is not None:
            check_parameter(op, name, share, rows, FLOAT32)


def counts(op: str, name: str, value: Tensor | int, rows: Tensor) -> Tensor:
    """A number of tokens, or one per row of `rows` [B, V], as integers [B]; values below 1 or above
    V mean all tokens."""
    if isinstance(value, Tensor):
        check_parameter(op, name, value, rows, INDICES)
        return value.contiguous()
    count = int(min(max(_number(op, name, value), 0), rows.shape[1]))
    return torch.full(rows.shape[:1], count, dtype=torch.int32, device=rows.device)


def shares(op: str, name: str, value: Tensor | float, rows: Tensor) -> Tensor:
    """A number, or one per row of `rows` [B, V], as float32 [B]; the integer 1 is allowed."""
    if isinstance(value, Tensor):
        check_parameter(op, name, value, rows, (*FLOATS, torch.float64, *INDICES))
        return value.float().contiguous()
    share = _number(op, name, value)
    return torch.full(rows.shape[:1], share, dtype=torch.float32, device=rows.device)


def rows_of_outputs(
    op: str, rows: Tensor, indices: Tensor | None, *parameters: Tensor | float
) -> tuple[Tensor, Tensor | None]:
    """(rows [B, V], indices [N]) unchanged; or, if a parameter is [N] and not [B], the gathered
    rows and None: then parameters are per output, as in FlashInfer."""
    if indices is not None:
        check_indices(op, indices, rows)
        tensors = [value for value in parameters if isinstance(value, Tensor)]
        if len(indices) != len(rows) and any(value.shape == indices.shape for value in tensors):
            return rows[indices.long()], None
    return rows, indices


def _number(op: str, name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        given = f"{type(value).__name__} {reprlib.repr(value)}"
        refuse(op, name, f"is {given}, neither a number nor a tensor")


def drawn_uniforms(
    op: str, rows: Tensor, indices: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """A uniform number in [0, 1) per output: one for each of `indices` or, without them, each of
    `rows` [B, V]."""
    if generator is not None and generator.device.type != rows.device.type:
        problem = f"is for {generator.device.type}, probabilities lie on {rows.device}"
        refuse(op, "generator", problem)
    if indices is not None:
        check_indices(op, indices, rows)
    count = rows.shape[0] if indices is None else indices.shape[0]
    return torch.rand(count, generator=generator, dtype=torch.float32, device=rows.device)


def check_order(op: str, order: str) -> bool:
    """Whether the order is "joint" (rather than "top_k_first"); raises BadArgument for other
    values."""
    if order not in ("top_k_first", "joint"):
        hint = "It is 'top_k_first' or 'joint'"
        refuse(op, "filter_apply_order", f"is {order!r}", hint)
    return order == "joint"


def refuse_nan(op: str, name: str, rows: Tensor) -> None:
    """Raise BadArgument if there is a NaN; waits for the device."""
    if bool(rows.isnan().any()):
        refuse(op, name, "holds NaN")
