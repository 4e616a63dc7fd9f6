"""Copies of a few integers from the host to a device, in a kernel's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect, refuse
from cairn.ops.elementwise.kernels import put_integers_kernel
from cairn.ops.registry import op

MOST = 128
"""Most integers in the arguments of a launch."""
STEP = 32
"""The count is rounded up to a multiple of this, so that fewer kernels are compiled."""
_ALIKE = (1 << 40) + 1
"""Added to 16 times a 32-bit number it gives a 64-bit integer that is neither 1 nor a multiple of
16: Triton specialises a kernel on these properties, for every integer of a tuple."""


@op(mutates=("output",))
def put_integers(output: Tensor, input: Tensor) -> None:
    """output = input, in place.

    Args:
        output: [n] int32, changed.
        input: [n] int32, on the CPU or on output's device.
    """
    output.copy_(input)


@put_integers.front
def copy_to_gpu_no_ce(input: Tensor, output: Tensor) -> None:
    """output = input, in place, without a copy engine: up to 128 integers travel as the arguments
    of a kernel, which does not queue after other copies. More are copied as torch does.

    The host reads `input` at once: a CUDA graph replays the values at capture.

    Args:
        input: [n] int32, on the CPU or on output's device.
        output: [n] int32, changed.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    name = "copy_to_gpu_no_ce"
    expect(name, "input", input, (None,), (torch.int32,))
    expect(name, "output", output, input.shape, (torch.int32,))
    if input.device.type != "cpu" and input.device != output.device:
        refuse(name, "input", f"lies on {input.device}, neither the CPU nor {output.device}")
    put_integers(output, input)


def _accepts(call: Call) -> bool:
    return (
        call.input.device.type == "cpu" and len(call.input) <= MOST and call.output.is_contiguous()
    )


@put_integers.implementation("triton", devices=gpu.DEVICES, when=_accepts)
def _(call: Call) -> None:
    numbers = call.input.tolist()
    if numbers:
        spare = [0] * (-len(numbers) % STEP)
        values = tuple((number & 0xFFFFFFFF) * 16 + _ALIKE for number in numbers + spare)
        put_integers_kernel[(1,)](
            values=values,
            out=call.output,
            count=len(numbers),
            COUNT=len(values),
            num_warps=1,
        )
