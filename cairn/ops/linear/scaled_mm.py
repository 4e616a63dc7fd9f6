"""8-bit matrix products with a scale per row of both operands, under sgl-kernel's names."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect, refuse
from cairn.ops.linear import scaled_launch
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import Op, op

E5M2 = torch.float8_e5m2


@op
def fp8_scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """(mat_a @ mat_b) * scales_a[m] * scales_b[n] + bias in float32, rounded once.

    Args:
        mat_a: [M, K] float8_e4m3fn.
        mat_b: [K, N] float8_e4m3fn.
        scales_a: M float32, or one for all rows.
        scales_b: N float32, or one for all columns.
        out_dtype: float32, bfloat16 or float16.
        bias: [N] of out_dtype, or None.
    Returns:
        [M, N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return _scaled(mat_a.float() @ mat_b.float(), scales_a, scales_b, bias).to(out_dtype)


@op
def int8_scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """(mat_a @ mat_b) * scales_a[m] * scales_b[n] + bias: an exact sum, then float32, rounded once.

    Args:
        mat_a: [M, K] int8.
        mat_b: [K, N] int8.
        scales_a, scales_b, out_dtype, bias: as in `fp8_scaled_mm`.
    Returns:
        [M, N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    exact = (mat_a.double() @ mat_b.double()).float()
    return _scaled(exact, scales_a, scales_b, bias).to(out_dtype)


@op
def bmm_fp8(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """(A @ B) * A_scale * B_scale of each batch, in float32, rounded once.

    Args:
        A: [b, M, K] float8_e4m3fn or float8_e5m2.
        B: [b, K, N] of these dtypes, not both float8_e5m2.
        A_scale, B_scale: one float32 each.
        dtype: dtype of the result: float32, bfloat16 or float16.
        out: [b, M, N] of that dtype, written and returned if given.
    Returns:
        [b, M, N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    product = torch.bmm(A.float(), B.float())
    return (product * (A_scale * B_scale).reshape(())).to(dtype)


def _scaled(product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    scaled = product * rows.reshape(-1, 1) * columns.reshape(1, -1)
    return scaled if bias is None else scaled + bias.float()


def _register(own: Op[..., Tensor], dtype: torch.dtype) -> None:
    """Register the check and the kernel of a product of codes of a dtype."""
    name = own.name

    @own.check
    def _(call: Call) -> None:
        expect(name, "mat_a", call.mat_a, 2, (dtype,))
        rows, width = call.mat_a.shape
        expect(name, "mat_b", call.mat_b, (width, None), (dtype,), call.mat_a)
        outputs = call.mat_b.shape[1]
        for argument, scale, count in (
            ("scales_a", call.scales_a, rows),
            ("scales_b", call.scales_b, outputs),
        ):
            expect(name, argument, scale, dtypes=FLOAT32, like=call.mat_a)
            if scale.numel() not in (1, count):
                shape = list(scale.shape)
                refuse(name, argument, f"has shape {shape}, neither {count} scales nor one")
        _check_dtype(name, "out_dtype", call.out_dtype)
        if call.bias is not None:
            expect(name, "bias", call.bias, (outputs,), (call.out_dtype,), call.mat_a)

    @own.implementation(
        "triton",
        devices=gpu.DEVICES,
        when=lambda call: scaled_launch.accepts(call.mat_a, call.mat_b),
        replayed=True,
    )
    def _(call: Call) -> Tensor:
        shape = (call.mat_a.shape[0], call.mat_b.shape[1])
        out = gpu.empty(shape, call.out_dtype, call.mat_a.device)
        given = (call.scales_a, call.scales_b, call.bias, out)
        tile = scaled_launch.tile_for(*shape, dtype, out.device)
        return scaled_launch.multiply(call.mat_a, call.mat_b.t(), *given, tile)


def _check_dtype(name: str, argument: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        refuse(name, argument, f"is {dtype}, not float32, bfloat16 or float16")


_register(fp8_scaled_mm, E4M3)
_register(int8_scaled_mm, torch.int8)


@bmm_fp8.check
def _(call: Call) -> None:
    name, kinds = "bmm_fp8", (E4M3, E5M2)
    expect(name, "A", call.A, 3, kinds)
    batch, rows, width = call.A.shape
    expect(name, "B", call.B, (batch, width, None), kinds, call.A)
    if call.A.dtype == call.B.dtype == E5M2:
        refuse(name, "B", "is float8_e5m2, and so is A: one of them must be float8_e4m3fn")
    for argument in ("A_scale", "B_scale"):
        scale = getattr(call, argument)
        expect(name, argument, scale, dtypes=FLOAT32, like=call.A)
        if scale.numel() != 1:
            refuse(name, argument, f"has shape {list(scale.shape)}, not one number")
    _check_dtype(name, "dtype", call.dtype)
    if call.out is not None:
        shape = (batch, rows, call.B.shape[2])
        expect(name, "out", call.out, shape, (call.dtype,), call.A)


fp8_scaled_mm.tolerance(
    {E4M3: (1.6e-2, 1e-2)},
    "tensor cores keep about 14 bits of a sum of 128 products",
)
