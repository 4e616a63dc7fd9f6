"""Queries of the lightning indexer in float8 (DeepSeek-V3.2 report, section 2.1)."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache, store_launch

NAME = "index_q_quantize"


@op
def index_q_quantize(q: Tensor, weights: Tensor, hadamard: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise queries with scales max(|q|, 1e-4) / 448 and multiply the scales into the heads'
    weights: the inputs of `paged_mqa_logits` and `ragged_mqa_logits`.

    Args:
        q: [T, Hi, D] float32, bfloat16 or float16.
        weights: [T, Hi] float32.
        hadamard: q is multiplied by the Hadamard matrix of D times D^-0.5 first, as the keys are.
    Returns:
        (codes [T, Hi, D] float8_e4m3fn, weights [T, Hi] float32).
    Raises:
        BadArgument: for another shape, dtype or device, or a D without a Hadamard matrix.
    """
    transformed = index_cache.rotate(q) if hadamard else q
    numbers, scale = index_cache.quantize(transformed, scale_ue8m0=False)
    return numbers, weights * scale


@index_q_quantize.check
def _(call: Call) -> None:
    expect(NAME, "q", call.q, 3, FLOATS)
    expect(NAME, "weights", call.weights, call.q.shape[:2], FLOAT32, call.q)
    if call.hadamard:
        index_cache.check_rotation(NAME, call.q.shape[2])


@index_q_quantize.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.q.is_contiguous() and call.weights.is_contiguous(),
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return store_launch.quantize_queries(call.q, call.weights, call.hadamard)
