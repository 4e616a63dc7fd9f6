"""Kernel of the cache write, and how kernels read a quantized cache."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.quantization.kernels import e4m3_code


@triton.jit
def quantized(x):
    """The rows of x [M, N] as bytes, see `cairn.ops.cache.quantized`: numbers and exponents [M].

    Reading is by hand, as rounding is: not every device that runs these kernels knows e4m3.
    """
    number = x.to(tl.float32)
    bits = tl.max(number.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    exponent = tl.where(finite, exponent, 255)
    byte = e4m3_code(number * inverse[:, None])
    return tl.where(finite[:, None], byte, 0).to(tl.uint8), exponent.to(tl.uint8)


@triton.jit
def scales(head, line, inner, alive, DIM: tl.constexpr, SIZE: tl.constexpr):
    """[N] float32: the scales of the slots `inner` of pages whose numbers are at head + line."""
    exponent = tl.load(head + line + (SIZE * DIM + inner * (1 - DIM)), mask=alive, other=0)
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def worth(byte, scale, DTYPE: tl.constexpr):
    """What the bytes are worth by their scales, as DTYPE."""
    bits = ((byte.to(tl.int32) & 0x80) << 24) | ((byte.to(tl.int32) & 0x7F) << 20)
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return (number * scale).to(DTYPE)


@triton.jit
def write_kv_kernel(
    k, v, k_cache, v_cache, location,
    k_stride, v_stride, page_stride, head_stride, size,
    HEADS: tl.constexpr, DIM: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store one token's key and value heads in its slot; a negative location is not written."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(location + token)
    if at >= 0:
        head = tl.arange(0, HP)
        d = tl.arange(0, DP)
        inside = (head < HEADS)[:, None] & (d < DIM)[None, :]
        read = head[:, None] * DIM + d[None, :]
        block = (at // size) * page_stride + head.to(tl.int64) * head_stride
        write = block[:, None] + (at % size) * DIM + d[None, :]
        key = tl.load(k + token * k_stride + read, mask=inside, other=0.0)
        value = tl.load(v + token * v_stride + read, mask=inside, other=0.0)
        if k_cache.dtype.element_ty == tl.uint8:
            behind = block + size * DIM + at % size
            key, key_exponent = quantized(key)
            value, value_exponent = quantized(value)
            tl.store(k_cache + behind, key_exponent, mask=head < HEADS)
            tl.store(v_cache + behind, value_exponent, mask=head < HEADS)
        tl.store(k_cache + write, key, mask=inside)
        tl.store(v_cache + write, value, mask=inside)
