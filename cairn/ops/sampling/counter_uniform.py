"""Counter-based random numbers: each number is a function of a seed and an index."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INT64, expect
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op
from cairn.ops.sampling.kernels.uniform import uniform_kernel

# Constants of splitmix64 (Steele, Lea and Flood 2014) as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
UNIFORM_BLOCK, UNIFORM_WARPS = 128, 4


@op
def counter_uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), a multiple of 2^-24, equal on every device.

    The index-th output of splitmix64 started at mix(seed), so near seeds do not share a stream.

    Args:
        seed, index: [B] int64, any values.
    Returns:
        [B] float32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    bits = _mix(_mix(seed) + index * _GAMMA + _GAMMA)
    return _shift(bits, 40).to(torch.float32) * 2.0**-24


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64 (torch's shift is arithmetic)."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; products wrap around."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


@counter_uniform.check
def _(call: Call) -> None:
    expect("counter_uniform", "seed", call.seed, 1, INT64)
    expect("counter_uniform", "index", call.index, call.seed.shape, INT64, call.seed)


def _vectors(call: Call) -> bool:
    return call.seed.is_contiguous() and call.index.is_contiguous()


@counter_uniform.implementation("triton", devices=gpu.DEVICES, when=_vectors, replayed=True)
def _(call: Call) -> Tensor:
    out = gpu.empty(call.seed.shape, torch.float32, call.seed.device)
    if out.numel():
        programs = -(-out.numel() // UNIFORM_BLOCK)
        pdl = uses_pdl(call.seed.device, 1, programs * UNIFORM_WARPS)
        uniform_kernel[(programs,)](
            seed=call.seed,
            index=call.index,
            out=out,
            count=out.numel(),
            BLOCK=UNIFORM_BLOCK,
            PDL=pdl,
            num_warps=UNIFORM_WARPS,
        )
    return out
