"""Keys and values in 8 or 4 bits, with scales for every slot and KV head.

A quantized cache is bytes: [pages, h_kv, S, b], contiguous, where b = `KvFormat.slot_bytes` of d
elements; its dtype, uint8 or int8, tells the format. The bytes of one page and KV head are one
block: the codes of its slots, followed by the slots' scales.

* fp8_e4m3 (uint8): one e4m3 code per element, and an exponent e per slot: the value of a code x is
  x * 2 ** (e - 127). A slot that was given an infinity or NaN is NaN as a whole: 0 times infinity,
  with e = 255.
* fp4_e2m1 (int8): two e2m1 codes share a byte, the first in its low half, and every 16 elements of
  a slot have an e4m3 scale, e4m3(largest / 6), which they are multiplied by. 16 elements that were
  given an infinity or NaN are NaN.

A page fills token by token. A scale of the whole page would depend on tokens that come later, or
change when they come, and what a query reads on how the sequence was cut into steps. A slot's scale
is a matter of its own token: every schedule stores the same bytes. In 8 bits it is a power of two,
which rounds nothing, so that a number is rounded once, when it is stored, and is exact in bfloat16
when it is read; and it fits a byte (E8M0 of the OCP microscaling formats).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import QUANTIZED
from cairn.ops.quantization import nvfp4
from cairn.ops.quantization.codes import E4M3
from cairn.specs.kv_format import FP8_E4M3, KvFormat

BYTES = torch.uint8
NOT_FINITE = 255
"""Exponent, or e4m3 scale, of a group that contained an infinity or NaN."""


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache is quantised."""
    return cache.dtype in QUANTIZED


def form_of(cache: Tensor) -> tuple[KvFormat, int]:
    """Format of a quantized cache [pages, h_kv, S, b], and the elements of a head, d."""
    form = QUANTIZED[cache.dtype]
    dim = form.head_dim(cache.shape[3])
    assert dim is not None, f"{cache.shape[3]} bytes a slot are no quantized head"
    return form, dim


def parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a quantized cache, as bytes: codes [pages, h_kv, S, ..] and scales [pages, h_kv, S,
    ..] of its slots."""
    (form, dim), size = form_of(cache), cache.shape[2]
    codes = form.code_bytes(dim)
    blocks = cache.view(BYTES).view(*cache.shape[:2], -1)
    return (
        blocks[..., : size * codes].unflatten(-1, (size, codes)),
        blocks[..., size * codes :].unflatten(-1, (size, -1)),
    )


def encode(x: Tensor, form: KvFormat) -> tuple[Tensor, Tensor]:
    """x [..., d] as bytes: codes [..., `code_bytes`] and scales [..., `scale_bytes`]."""
    if form == FP8_E4M3:
        codes, exponents = quantize(x)
        return codes, exponents.unsqueeze(-1)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    codes, scales = nvfp4.quantize(x, one)
    finite = x.isfinite().unflatten(-1, (-1, nvfp4.BLOCK)).all(dim=-1)
    return codes, scales.view(BYTES).masked_fill(~finite, NOT_FINITE)


def decode(codes: Tensor, scales: Tensor, form: KvFormat) -> Tensor:
    """The values [..., d] float32 of codes and scales from `encode`, both contiguous."""
    if form == FP8_E4M3:
        return dequantize(codes, scales.squeeze(-1))
    values = nvfp4.unpacked(codes).unflatten(-1, (-1, nvfp4.BLOCK))
    return (values * scales.view(E4M3).float().unsqueeze(-1)).flatten(-2)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] in 8 bits as (codes [..., d], exponents [...]), both as bytes.

    The exponent is the least that brings the largest magnitude within e4m3; values are rounded to
    the nearest, ties to even.
    """
    bits = x.float().abs().amax(dim=-1).view(torch.int32)
    # The largest e4m3 value, 448, is 1.75 * 2 ** 8.
    exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=1)
    exponent.masked_fill_(bits >= 0x7F800000, NOT_FINITE)
    scaled = x.float() / scales(exponent).unsqueeze(-1)
    scaled.masked_fill_((exponent == NOT_FINITE).unsqueeze(-1), 0)
    return scaled.to(E4M3).view(BYTES), exponent.to(BYTES)


def dequantize(codes: Tensor, exponents: Tensor) -> Tensor:
    """The values [..., d] float32 of codes [..., d] (contiguous) with exponents [...]."""
    return codes.view(E4M3).float() * scales(exponents).unsqueeze(-1)


def scales(exponents: Tensor) -> Tensor:
    """2 ** (e - 127) as float32; infinite for NOT_FINITE."""
    return (exponents.int() << 23).view(torch.float32)


def pack(values: Tensor, form: KvFormat = FP8_E4M3) -> Tensor:
    """Whole pages [..., S, d] in the format of a quantized cache, [..., S, b] bytes."""
    blocks = torch.cat([part.flatten(-2) for part in encode(values, form)], dim=-1)
    width = form.slot_bytes(values.shape[-1])
    return blocks.view(*values.shape[:-1], width).view(getattr(torch, form.dtype))


def take(cache: Tensor, *index: Tensor) -> Tensor:
    """cache[index] of a quantized cache [pages, h_kv, S, b], dequantized: [.., S, d] float32."""
    codes, found = parts(cache)
    return decode(codes[index], found[index], form_of(cache)[0])


def fits(x: Tensor, cache: Tensor) -> bool:
    """Whether kernels read the cache for queries, or write keys, x [T, heads, d]."""
    dim = x.shape[2]
    if is_quantized(cache):
        return form_of(cache)[1] == dim and cache.is_contiguous()
    return x.dtype == cache.dtype and cache.stride()[2:] == (dim, 1)
