"""Hadamard transforms of c * 2^m elements, c = 12, 20, 28 or 40."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.elementwise.hadamard_transform import hadamard_transform
from cairn.ops.registry import op

NAME = "hadamard_transform_blocks"
ORDERS = (12, 20, 28, 40)
LEAST = 4
"""Smallest power of two beside c."""
WILLIAMSON = {
    20: ("+----", "+----", "++--+", "+-++-"),
    28: ("+------", "++----+", "+-+--+-", "+--++--"),
}
"""First rows of the four circulant blocks (J. Williamson 1944; N. Sloane's had.20.will and
had.28.will)."""


@op
def hadamard_transform_blocks(x: Tensor, order: int, scale: float = 1.0) -> Tensor:
    """H_c X H_n * scale of a row as the matrix X [c, n], in float32, rounded once.

    A row is padded with zeros to c * n, n the least power of two from 4 on, and cut back. H_n is in
    Sylvester's order. H_12 is Paley's second construction for q = 5, H_20 and H_28 Williamson's
    (Sloane's had.20.will, had.28.will), H_40 H_2 times Paley's first for q = 19 (had.40.tpal).

    Args:
        x: [..., d] float32, bfloat16 or float16, d > 0.
        order: c.
        scale: the result is multiplied by it; (c * n)^-0.5 makes it a rotation.
    Raises:
        BadArgument: for another shape, dtype or order.
    """
    width = x.shape[-1]
    size = max(LEAST, gpu.next_power_of_2(-(-width // order)))
    padded = torch.nn.functional.pad(x.float(), (0, order * size - width))
    transformed = hadamard_transform.reference(padded.unflatten(-1, (order, size)))
    y = (hadamard(order, x.device) @ transformed).flatten(-2)
    return (y[..., :width] * scale).to(x.dtype)


@hadamard_transform_blocks.check
def _(call: Call) -> None:
    if call.order not in ORDERS:
        refuse(NAME, "order", f"is {call.order}, not 12, 20, 28 or 40")
    name = f"hadamard_transform_{call.order}n"
    expect(name, "x", call.x, dtypes=FLOATS)
    if call.x.dim() == 0 or call.x.shape[-1] == 0:
        refuse(name, "x", f"has shape {list(call.x.shape)}, not [..., d] with d > 0")


@hadamard_transform_blocks.front
def hadamard_transform_12n(x: Tensor, scale: float = 1.0) -> Tensor:
    """`hadamard_transform_blocks` of c = 12.

    Args:
        x: [..., d] float32, bfloat16 or float16, d > 0.
        scale: the result is multiplied by it.
    Raises:
        BadArgument: for another shape or dtype.
    """
    return hadamard_transform_blocks(x, 12, scale)


@hadamard_transform_blocks.front
def hadamard_transform_20n(x: Tensor, scale: float = 1.0) -> Tensor:
    """`hadamard_transform_blocks` of c = 20; see `hadamard_transform_12n`."""
    return hadamard_transform_blocks(x, 20, scale)


@hadamard_transform_blocks.front
def hadamard_transform_28n(x: Tensor, scale: float = 1.0) -> Tensor:
    """`hadamard_transform_blocks` of c = 28; see `hadamard_transform_12n`."""
    return hadamard_transform_blocks(x, 28, scale)


@hadamard_transform_blocks.front
def hadamard_transform_40n(x: Tensor, scale: float = 1.0) -> Tensor:
    """`hadamard_transform_blocks` of c = 40; see `hadamard_transform_12n`."""
    return hadamard_transform_blocks(x, 40, scale)


def hadamard(order: int, device: torch.device | None = None) -> Tensor:
    """H_c [c, c] float32, of order 12, 20, 28 or 40. Nothing is copied from the host, so that it
    can be made in a CUDA graph."""
    device = device or torch.device("cpu")
    if order == 12:
        return _paley_second(5, device)
    if order == 40:
        h = _paley_first(19, device)
        return torch.cat((torch.cat((h, h), dim=1), torch.cat((h, -h), dim=1)))
    return _williamson(WILLIAMSON[order], device)


def _circulant(signs: str, device: torch.device) -> Tensor:
    """Each row is the row above, rotated right by one; `signs` is the first row."""
    size = len(signs)
    bits = sum(1 << i for i, sign in enumerate(signs) if sign == "+")
    at = torch.arange(size, device=device)
    shift = (at - at.unsqueeze(1)) % size
    return ((bits >> shift) & 1).to(torch.float32) * 2 - 1


def _squares(prime: int) -> str:
    """The sign of each residue modulo a prime: "+" for 0 and quadratic residues."""
    squares = {i * i % prime for i in range(prime)}
    return "".join("+" if i in squares else "-" for i in range(prime))


def _identity(size: int, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=torch.float32, device=device)


def _paley_first(prime: int, device: torch.device) -> Tensor:
    inner = 2 * _identity(prime, device) - _circulant(_squares(prime), device)
    border = torch.nn.functional.pad(inner, (0, 0, 1, 0), value=-1.0)
    return torch.nn.functional.pad(border, (1, 0), value=1.0)


def _paley_second(prime: int, device: torch.device) -> Tensor:
    inner = _circulant(_squares(prime), device) - _identity(prime, device)
    core = torch.nn.functional.pad(inner, (1, 0, 1, 0), value=1.0)
    core = core - torch.nn.functional.pad(_identity(1, device), (0, prime, 0, prime))
    ones = _circulant("++", device) - 2 * torch.nn.functional.pad(
        _identity(1, device), (1, 0, 1, 0)
    )
    zeros = torch.nn.functional.pad(2 * _identity(1, device), (0, 1, 0, 1)) - 1
    return torch.kron(core, ones) + torch.kron(_identity(prime + 1, device), zeros)


def _williamson(rows: tuple[str, ...], device: torch.device) -> Tensor:
    a, b, c, d = (_circulant(row, device) for row in rows)
    blocks = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(line, dim=1) for line in blocks])


hadamard_transform_blocks.tolerance(
    {
        torch.float32: (1e-4, 2e-4),
        torch.float16: (5e-3, 5e-3),
        torch.bfloat16: (1.6e-2, 2e-2),
    },
    "sums of many numbers, in another order",
)
