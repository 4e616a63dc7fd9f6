"""Small integers from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import expect, refuse
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op(mutates=("output",))
def copy_to_gpu_no_ce(input: Tensor, output: Tensor) -> None:
    """output = input, in place.

    Args:
        input: [n] int32, on the CPU or on output's device.
        output: [n] int32, changed.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    output.copy_(input)


@copy_to_gpu_no_ce.check
def _(input: Tensor, output: Tensor) -> None:
    name = "copy_to_gpu_no_ce"
    expect(name, "input", input, (None,), (torch.int32,))
    expect(name, "output", output, input.shape, (torch.int32,))
    if input.device.type != "cpu" and input.device != output.device:
        refuse(name, "input", f"lies on {input.device}, neither the CPU nor {output.device}")


@copy_to_gpu_no_ce.cases
def _(make: Make) -> Cases:
    for count in (0, 1, 64, 72, 1000):
        given = make.randint(-(1 << 31), 1 << 31, count, dtype=torch.int32)
        yield make.args(given, make.empty(count, dtype=torch.int32))


@copy_to_gpu_no_ce.bench
def _(draw: Draw) -> Points:
    for count in (32, 64, 72):
        out = draw.randint(0, 1 << 20, count, dtype=torch.int32)
        yield Point(str(count), draw.args(out.clone(), out), moved(out, out))
