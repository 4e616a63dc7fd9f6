"""Keys and values in 8 bits: float8 e4m3 numbers, and a power of two for every slot and KV head.

A quantized cache is bytes: [pages, h_kv, S, d + 1] uint8, contiguous. The bytes of one page and KV
head are one block: the numbers of its slots, S * d of them, and behind them the slots' exponents, S
bytes. A number x of a slot with exponent e is worth x * 2 ** (e - 127). A slot that was given an
infinity or NaN is NaN as a whole: 0 times infinity, with e = 255.

A page fills token by token. A scale of the whole page would depend on tokens that come later, or
change when they come, and what a query reads on how the sequence was cut into steps. A slot's scale
is a matter of its own token: every schedule stores the same bytes. A power of two rounds nothing,
so that a number is rounded once, when it is stored, and is exact in bfloat16 when it is read; and
it fits a byte (E8M0 of the OCP microscaling formats).
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBER = torch.float8_e4m3fn
BYTES = torch.uint8
NOT_FINITE = 255


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache is bytes."""
    return cache.dtype == BYTES


def parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a quantized cache: numbers [pages, h_kv, S, d] and exponents [pages, h_kv, S], both
    as bytes."""
    size, dim = cache.shape[2], cache.shape[3] - 1
    blocks = cache.view(*cache.shape[:2], -1)
    return blocks[..., : size * dim].unflatten(-1, (size, dim)), blocks[..., size * dim :]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] as (numbers [..., d], exponents [...]), both as bytes.

    The exponent is the least that brings the largest number within e4m3; numbers are rounded to
    the nearest, ties to even.
    """
    bits = x.float().abs().amax(dim=-1).view(torch.int32)
    # The largest e4m3 number, 448, is 1.75 * 2 ** 8.
    exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=1)
    exponent.masked_fill_(bits >= 0x7F800000, NOT_FINITE)
    scaled = x.float() / scales(exponent).unsqueeze(-1)
    scaled.masked_fill_((exponent == NOT_FINITE).unsqueeze(-1), 0)
    return scaled.to(NUMBER).view(BYTES), exponent.to(BYTES)


def dequantize(numbers: Tensor, exponents: Tensor) -> Tensor:
    """What bytes [..., d] (contiguous) with exponents [...] are worth, [..., d] float32."""
    return numbers.view(NUMBER).float() * scales(exponents).unsqueeze(-1)


def scales(exponents: Tensor) -> Tensor:
    """2 ** (e - 127) as float32; infinite for NOT_FINITE."""
    return (exponents.int() << 23).view(torch.float32)


def pack(values: Tensor) -> Tensor:
    """Whole pages [..., S, d] as a quantized cache holds them, [..., S, d + 1] bytes."""
    numbers, exponents = quantize(values)
    blocks = torch.cat([numbers.flatten(-2), exponents], dim=-1)
    return blocks.view(*values.shape[:-1], values.shape[-1] + 1)


def take(cache: Tensor, *index: Tensor) -> Tensor:
    """cache[index] of a quantized cache [pages, h_kv, S, d + 1], worth in float32."""
    numbers, exponents = parts(cache)
    return dequantize(numbers[index], exponents[index])


def fits(x: Tensor, cache: Tensor) -> bool:
    """Whether kernels read the cache for queries, or write keys, x [T, heads, d]."""
    dim = x.shape[2]
    if is_quantized(cache):
        return cache.shape[3] == dim + 1 and cache.is_contiguous()
    return x.dtype == cache.dtype and cache.stride()[2:] == (dim, 1)
