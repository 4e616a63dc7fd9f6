"""The experts of a mixture (Shazeer et al. 2017): gated feed-forward layers, each run on its
tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.activation.gelu_and_mul import gelu_and_mul
from cairn.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.moe import experts_launch, rows_launch
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import Op, op

NAME = "fused_experts"
ACTIVATIONS: dict[str, Op[..., Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


@op
def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> Tensor:
    """Sum over j of topk_weights[t, j] * w2[e] act(w1[e] x_t), e = topk_ids[t, j], in float32,
    rounded once. Weights of experts without tokens are not read.

    With scales w1 and w2 are e4m3 in blocks of 128 x 128 (DeepSeek-V3 report, section 3.3), and
    their inputs, x and the results of act, are rounded to e4m3 with a scale for every 128 elements:
    max(|x|, 1e-10) / 448.

    Args:
        hidden_states: [T, K] float32, bfloat16 or float16, x.
        w1: [E, 2N, K] of its dtype, or e4m3: rows of the gate, then of the up projection.
        w2: [E, K, N] of w1's dtype.
        topk_weights: [T, k] float32.
        topk_ids: [T, k] int32 or int64; -1: an expert of another device, which is skipped.
        activation: "silu", "gelu" (by erf) or "gelu_tanh": act is activation(gate) * up.
        apply_router_weight_on_input: the weight multiplies x_t, not the result.
        routed_scaling_factor: the sum is multiplied by it.
        w1_scale: [E, 2 ceil(N / 128), ceil(K / 128)] float32, the blocks of the gate's rows first;
            None: w1 is not quantised.
        w2_scale: [E, ceil(K / 128), ceil(N / 128)] float32, where w1_scale is given.
        swiglu_limit: gates are clamped to at most this, up projections to -limit .. limit; 0: no
            limit.
    Returns:
        [T, K] of hidden_states' dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for experts out of range.
    """
    activate = ACTIVATIONS[activation].reference

    def act(both: Tensor) -> Tensor:
        return activate(clamped(both, swiglu_limit))

    def expert(x: Tensor, number: int) -> Tensor:
        if w1_scale is None or w2_scale is None:
            return act(x @ w1[number].float().T) @ w2[number].float().T
        halves = zip(w1[number].chunk(2), w1_scale[number].chunk(2), strict=True)
        up = torch.cat([blocks.dequantized(*half) for half in halves])
        gated = act(blocks.rounded(x) @ up.T)
        return blocks.rounded(gated) @ blocks.dequantized(w2[number], w2_scale[number]).T

    total = _summed(
        hidden_states.float(), topk_weights, topk_ids, expert, apply_router_weight_on_input
    )
    return (total * routed_scaling_factor).to(hidden_states.dtype)


def clamped(both: Tensor, limit: float) -> Tensor:
    """Gates [..., N] and up projections [..., N], concatenated, clamped to a limit; 0:
    unchanged."""
    if not limit:
        return both
    gates, ups = both.chunk(2, dim=-1)
    return torch.cat((gates.clamp(max=limit), ups.clamp(-limit, limit)), dim=-1)


def _summed(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert: Callable[[Tensor, int], Tensor],
    weigh_input: bool,
) -> Tensor:
    """[T, K] float32, the weighted sum of the experts' outputs; `expert` is called once per expert,
    with all of its tokens."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    token = order.div(max(1, ids.shape[1]), rounding_mode="floor")
    weight = weights.float().flatten()[order].unsqueeze(1)
    numbers, counts = (
        found.tolist() for found in flat[order].unique_consecutive(return_counts=True)
    )
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    end = 0
    for number, count in zip(numbers, counts, strict=True):
        begin, end = end, end + count
        if number < 0:
            continue
        own, share = token[begin:end], weight[begin:end]
        rows = x[own]
        if weigh_input:
            total.index_add_(0, own, expert((rows.float() * share).to(x.dtype), number).float())
        else:
            total.index_add_(0, own, expert(rows, number).float() * share)
    return total


@fused_experts.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        not call.apply_router_weight_on_input
        and call.hidden_states.stride(1) == 1
        and all(
            x is None or x.is_contiguous()
            for x in (call.w1, call.w2, call.topk_weights, call.topk_ids)
        )
        and rows_launch.fits(call.topk_ids.shape[1])
        and (
            call.w1_scale is None
            or (call.w1.shape[2] % blocks.SIZE == 0 and call.w2.shape[2] % blocks.SIZE == 0)
        )
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    return experts_launch.run_experts(
        call.hidden_states,
        experts_launch.Scaled(call.w1, call.w1_scale),
        experts_launch.Scaled(call.w2, call.w2_scale),
        call.topk_weights,
        call.topk_ids,
        call.activation,
        call.routed_scaling_factor,
        call.swiglu_limit,
    )


@fused_experts.implementation("torch", devices=("cpu",), when=lambda call: call.w1_scale is None)
def _(call: Call) -> Tensor:
    """Products in the dtype of the weights, which are not converted."""
    act = ACTIVATIONS[call.activation]

    def expert(x: Tensor, number: int) -> Tensor:
        gated = torch.nn.functional.linear(x, call.w1[number])
        activated = act(clamped(gated, call.swiglu_limit))
        return torch.nn.functional.linear(activated, call.w2[number])

    total = _summed(
        call.hidden_states,
        call.topk_weights,
        call.topk_ids,
        expert,
        call.apply_router_weight_on_input,
    )
    return (total * call.routed_scaling_factor).to(call.hidden_states.dtype)


@fused_experts.fake
def _(call: Call) -> Tensor:
    shape, dtype = call.hidden_states.shape, call.hidden_states.dtype
    return torch.empty(shape, dtype=dtype, device=call.hidden_states.device)


@fused_experts.check
def _(call: Call) -> None:
    expect(NAME, "hidden_states", call.hidden_states, 2, FLOATS)
    tokens, width = call.hidden_states.shape
    own = call.hidden_states.dtype if call.w1_scale is None else E4M3
    expect(NAME, "w1", call.w1, (None, None, width), (own,), call.hidden_states)
    experts, doubled, _ = call.w1.shape
    if doubled % 2:
        refuse(NAME, "w1", f"has shape {list(call.w1.shape)}, not [E, 2N, K]")
    inner = doubled // 2
    expect(NAME, "w2", call.w2, (experts, width, inner), (call.w1.dtype,), call.hidden_states)
    if call.w1_scale is not None or call.w2_scale is not None:
        across, down = blocks.count(width), blocks.count(inner)
        for name, scale, shape in (
            ("w1_scale", call.w1_scale, (experts, 2 * down, across)),
            ("w2_scale", call.w2_scale, (experts, across, down)),
        ):
            expect(NAME, name, scale, shape, (torch.float32,), call.hidden_states)
    expect(NAME, "topk_ids", call.topk_ids, (tokens, None), INDICES, call.hidden_states)
    expect_within(NAME, "topk_ids", call.topk_ids, experts, -1)
    dtypes = (torch.float32,)
    expect(NAME, "topk_weights", call.topk_weights, call.topk_ids.shape, dtypes, call.hidden_states)
    if call.activation not in ACTIVATIONS:
        refuse(NAME, "activation", f"is {call.activation!r}, not one of {', '.join(ACTIVATIONS)}")
    if not call.swiglu_limit >= 0:
        refuse(NAME, "swiglu_limit", f"is {call.swiglu_limit}, not a number >= 0")


fused_experts.tolerance(
    {torch.bfloat16: (2e-2, 2e-2), E4M3: (2e-2, 1e-1)},
    "the result of either product may be rounded to the weights' dtype; with scales a result of "
    "the first product near the middle of two codes may become the other, a sixteenth of it away",
)
