"""Sampling from rows of logits, with top-k and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.registry import op
from cairn.ops.sampling import arguments, launch
from cairn.ops.sampling.draw_from_probs import draw_from_probs

NAME = "top_k_top_p_sampling_from_logits"


@op
def draw_from_logits(
    logits: Tensor,
    uniform: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    joint: bool = False,
) -> Tensor:
    """draw_from_probs of softmax(logits), in float32.

    Args:
        logits: [B, V] float32, bfloat16 or float16.
        uniform: [B] float32 in [0, 1).
        top_k, top_p, joint: as in draw_from_probs.
    Returns:
        [B] int32; -1 for a row that holds NaN or +inf, or nothing but -inf.
    """
    probs = torch.softmax(logits.float(), dim=-1)
    return draw_from_probs(probs, uniform, top_k, top_p, joint=joint)


@draw_from_logits.check
def _(call: Call) -> None:
    arguments.check_rows(NAME, "logits", call.logits, FLOATS)
    arguments.check_filters(NAME, call.logits, call.top_k, call.top_p)
    expect(NAME, "uniform", call.uniform, call.logits.shape[:1], (torch.float32,), like=call.logits)


@draw_from_logits.front
def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
) -> Tensor:
    """Sample one token per row of softmax(logits) after top-k and top-p; see sampling_from_probs.

    Args:
        logits: [B, V] float32, bfloat16 or float16; the softmax is in float32.
        top_k: a number, or [B] int32 or int64, as in top_k_renorm_probs: logits whose softmax is
            equal in float32 are equal. With N != B `indices` also [N], of the outputs, as is top_p
            then.
        top_p: a number, or [B] of them, as in top_p_renorm_probs.
        filter_apply_order: "top_k_first": the softmax of what top-k left, then top-p; "joint": the
            softmax of all, then both.
        indices: [N] int32 or int64, the row that each output is drawn from; None: every row once.
        deterministic: ignored, draws always are.
        generator: where the uniform numbers come from; None: the device's own.
        check_nan: refuse logits with NaN; waits for the device.
    Returns:
        [N] int32; -1 for a row that holds NaN or +inf, or nothing but -inf.
    Raises:
        BadArgument: for another shape, dtype or device, or NaN if asked to look for it; on the CPU
            for an index of no row.
    """
    joint = arguments.check_order(NAME, filter_apply_order)
    arguments.check_rows(NAME, "logits", logits, FLOATS)
    if check_nan:
        arguments.refuse_nan(NAME, "logits", logits)
    logits, indices = arguments.rows_of_outputs(NAME, logits, indices, top_k, top_p)
    k = arguments.counts(NAME, "top_k", top_k, logits)
    p = arguments.shares(NAME, "top_p", top_p, logits)
    uniform = arguments.drawn_uniforms(NAME, logits, indices, generator)
    if indices is None:
        return draw_from_logits(logits, uniform, k, p, joint)
    probs = torch.softmax(logits.float(), dim=-1)
    return draw_from_probs(probs, uniform, k, p, None, indices, joint)


def _accepts(call: Call) -> bool:
    given = [p for p in (call.top_k, call.top_p) if p is not None]
    return launch.accepts(call.logits, call.uniform, *given, dtypes=FLOATS)


@draw_from_logits.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> Tensor:
    """The kernels of draw_tokens, at temperature 1."""
    source = launch.Source(call.logits, softmax=True)
    filters = launch.Filters(call.top_k, call.top_p, joint=call.joint)
    return launch.draw(source, filters, None, call.uniform, torch.int32)
