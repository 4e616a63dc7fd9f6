"""Sampling of one token per row of logits, with parameters per row."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, INDICES, INT64
from cairn.ops.registry import op
from cairn.ops.sampling import launch
from cairn.ops.sampling.argmax_tokens import argmax_tokens
from cairn.ops.sampling.arguments import check_parameter, check_rows
from cairn.ops.sampling.counter_uniform import counter_uniform
from cairn.ops.sampling.draw_from_probs import draw_from_probs


@op
def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    index: Tensor,
) -> Tensor:
    """Sample one token per row: softmax(logits / temperature), top-k, top-p, min-p, then a draw; or
    the largest logit at temperature 0.

    The result of a row does not depend on the other rows or their number, not even in rounding.

    Args:
        logits: [n, V] float32.
        temperature: [n] float32, 0 or a normal number > 0; 0: `argmax_tokens`, which ignores the
            other parameters.
        top_k, top_p, min_p: [n], as in top_k_renorm_probs, top_p_renorm_probs and
            min_p_renorm_probs.
        seed, index: [n] int64, as in counter_uniform.
    Returns:
        [n] int64; -1 for a row that holds NaN, or nothing but -inf, or is drawn and holds +inf.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    greedy = temperature == 0
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    probs = torch.softmax(scaled / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    drawn = draw_from_probs.reference(probs, counter_uniform(seed, index), top_k, top_p, min_p)
    return torch.where(greedy, argmax_tokens(logits), drawn)


@draw_tokens.check
def _(call: Call) -> None:
    name = "draw_tokens"
    check_rows(name, "logits", call.logits, FLOAT32)
    check_parameter(name, "temperature", call.temperature, call.logits, FLOAT32)
    check_parameter(name, "top_k", call.top_k, call.logits, INDICES)
    check_parameter(name, "top_p", call.top_p, call.logits, FLOAT32)
    check_parameter(name, "min_p", call.min_p, call.logits, FLOAT32)
    check_parameter(name, "seed", call.seed, call.logits, INT64)
    check_parameter(name, "index", call.index, call.logits, INT64)


def _rows(call: Call) -> bool:
    return launch.accepts(
        call.logits, call.temperature, call.top_k, call.top_p, call.min_p, call.seed, call.index
    )


@draw_tokens.implementation("triton", devices=gpu.DEVICES, when=_rows, replayed=True)
def _(call: Call) -> Tensor:
    """Search the filters' thresholds instead of sorting rows."""
    source = launch.Source(call.logits, softmax=True, temperature=call.temperature)
    filters = launch.Filters(call.top_k, call.top_p, call.min_p)
    return launch.draw(source, filters, call.seed, call.index, torch.int64)
