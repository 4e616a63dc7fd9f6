"""Top-k filter of logits (Fan et al. 2018, section 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES
from cairn.ops.registry import op
from cairn.ops.sampling import arguments, launch
from cairn.ops.select_k import launch as select_k

NAME = "top_k_mask_logits"


@op
def top_k_mask(logits: Tensor, top_k: Tensor) -> Tensor:
    """top_k_mask_logits with a tensor of k.

    Args:
        logits: [B, V] float32, bfloat16 or float16.
        top_k: [B] int32 or int64; k < 1 or k >= V keeps all.
    Returns:
        [B, V], logits' dtype.
    """
    vocabulary = logits.shape[1]
    limited = (top_k >= 1) & (top_k < vocabulary)
    k = torch.where(limited, top_k, vocabulary).long()
    least = logits.sort(dim=-1, descending=True).values.gather(-1, k[:, None] - 1)
    return torch.where((logits >= least) | ~limited[:, None], logits, -torch.inf)


@top_k_mask.check
def _(call: Call) -> None:
    arguments.check_rows(NAME, "logits", call.logits, FLOATS)
    arguments.check_parameter(NAME, "top_k", call.top_k, call.logits, INDICES)


@top_k_mask.front(replayed=True)
def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """Set the logits of each row that are smaller than its k-th largest to -inf.

    Logits equal to the k-th largest are all kept. NaN counts as largest and is replaced by -inf.

    Args:
        logits: [B, V] float32, bfloat16 or float16; rows may be strided.
        top_k: a number, or [B] int32 or int64; k < 1 or k >= V keeps all.
    Returns:
        [B, V], logits' dtype, contiguous.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    arguments.check_rows(NAME, "logits", logits, FLOATS)
    return top_k_mask(logits, arguments.counts(NAME, "top_k", top_k, logits))


def _rows(call: Call) -> bool:
    return launch.accepts(call.logits, call.top_k, dtypes=FLOATS)


@top_k_mask.implementation("triton", devices=gpu.DEVICES, when=_rows, replayed=True)
def _(call: Call) -> Tensor:
    """Search the k-th largest logit instead of sorting the row."""
    return select_k.mask_smaller(call.logits, call.top_k)
