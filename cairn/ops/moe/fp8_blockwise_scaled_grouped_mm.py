"""Grouped fp8 products: e4m3 rows, sorted by expert, with the matrices of their experts."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, INT32, expect
from cairn.ops.moe import experts_launch
from cairn.ops.moe.experts_launch import Scaled
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op

NAME = "fp8_blockwise_scaled_grouped_mm"


@op(mutates=("output",))
def fp8_blockwise_scaled_grouped_mm(
    output: Tensor,
    a_ptrs: Tensor | None,
    b_ptrs: Tensor | None,
    out_ptrs: Tensor | None,
    a_scales_ptrs: Tensor | None,
    b_scales_ptrs: Tensor | None,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    stride_a: Tensor | None,
    stride_b: Tensor | None,
    stride_c: Tensor | None,
    layout_sfa: Tensor | None,
    layout_sfb: Tensor | None,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    workspace: Tensor | None,
) -> None:
    """output[o : o + m] = `fp8_blockwise_scaled_mm` of a[o : o + m] and b[e] for each expert e,
    where o = expert_offsets[e] and m = problem_sizes[e, 0]. Rows of no expert are not changed.

    Args:
        output: [R, N] float32, bfloat16 or float16, written.
        a: [R, K] float8_e4m3fn.
        b: [E, K, N] float8_e4m3fn.
        scales_a: [R, ceil(K / 128)] float32, any strides.
        scales_b: [E, ceil(K / 128), ceil(N / 128)] float32, any strides.
        problem_sizes: [E, 3] int32: (m, n, k) of each expert; only m is read.
        expert_offsets: [E] int32, or [E + 1]: the first row of each expert.
        a_ptrs, b_ptrs, out_ptrs, a_scales_ptrs, b_scales_ptrs, stride_a, stride_b, stride_c,
        layout_sfa, layout_sfb, workspace: ignored; may be None.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    sizes = zip(expert_offsets.tolist(), problem_sizes[:, 0].tolist(), strict=False)
    for expert, (first, count) in enumerate(sizes):
        rows = slice(first, first + count)
        own = a[rows].float() * blocks.spread(scales_a[rows], 1, a.shape[1])
        matrix = blocks.dequantized(b[expert].t(), scales_b[expert].t())
        output[rows] = (own @ matrix.t()).to(output.dtype)


@fp8_blockwise_scaled_grouped_mm.fake
def _(call: Call) -> None:
    return None


@fp8_blockwise_scaled_grouped_mm.check
def _(call: Call) -> None:
    expect(NAME, "a", call.a, 2, (E4M3,), call.output)
    rows, width = call.a.shape
    expect(NAME, "b", call.b, (None, width, None), (E4M3,), call.output)
    experts, _, outputs = call.b.shape
    across, down = blocks.count(width), blocks.count(outputs)
    expect(NAME, "output", call.output, (rows, outputs), FLOATS)
    expect(NAME, "scales_a", call.scales_a, (rows, across), FLOAT32, call.output)
    expect(NAME, "scales_b", call.scales_b, (experts, across, down), FLOAT32, call.output)
    expect(NAME, "problem_sizes", call.problem_sizes, (experts, 3), INT32, call.output)
    expect(NAME, "expert_offsets", call.expert_offsets, 1, INT32, call.output)
    if call.expert_offsets.shape[0] != experts:
        expect(NAME, "expert_offsets", call.expert_offsets, (experts + 1,), INT32)


@fp8_blockwise_scaled_grouped_mm.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.a.stride(1) == 1
        and call.output.stride(1) == 1
        and call.b.transpose(1, 2).is_contiguous()
        and call.problem_sizes.is_contiguous()
        and call.expert_offsets.is_contiguous()
        and call.b.shape[0] <= experts_launch.MAX_EXPERTS
    ),
    replayed=True,
)
def _(call: Call) -> None:
    experts_launch.multiply_sorted(
        Scaled(call.a, call.scales_a),
        Scaled(call.b.transpose(1, 2), call.scales_b.transpose(1, 2)),
        call.output,
        call.problem_sizes,
        call.expert_offsets,
    )
