"""Benchmark points of this family's ops, for `cairn bench ops`: one test case of each op, because
no supported model uses them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.gguf.ggml import (
    ggml_dequantize,
    ggml_moe_a8,
    ggml_moe_a8_vec,
    ggml_mul_mat_a8,
    ggml_mul_mat_vec_a8,
)
from cairn.ops.registry import Op
from cairn.ops.testing import cases_of


def _on_a_case(op: Op[..., Any]) -> None:
    @op.bench
    def _(draw: Draw) -> Points:
        given = cases_of(op, draw.device)[0]
        tensors = [x for x in given.args if isinstance(x, Tensor)]
        yield Point("a case", given, moved(*tensors))


for own in (
    *(ggml_dequantize, ggml_mul_mat_vec_a8, ggml_mul_mat_a8),
    *(ggml_moe_a8, ggml_moe_a8_vec),
):
    _on_a_case(own)
