"""Maximum, log-sum-exp and rank of logits, for log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, expect
from cairn.ops.grid_barrier import STRIDE, counters
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op
from cairn.ops.sampling.arguments import check_rows
from cairn.ops.sampling.kernels.scores import score_kernel

CHUNK = 4096
"""Logits per program. It is fixed, because the rounding of sums depends on how rows are split."""
WARPS = 4


@op
def score_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit, the log of the sum of exp(logit - largest), and one token's rank.

    The rank is 1 + the number of larger logits in the row. The log-probability of a token is
    (logit - largest) - log of the sum, which is accurate for probabilities near 1.

    Args:
        logits: [n, V] float32, rows of any stride.
        tokens: [n] int64 in [0, V).
    Returns:
        [n] float32, NaN for a row that holds NaN; [n] float32, NaN too for one that holds +inf or
        nothing but -inf; [n] int64.
    Raises:
        BadArgument: for another shape or dtype.
    """
    largest = logits.amax(dim=-1)
    log_sum = (logits - largest[:, None]).exp().sum(dim=-1).log()
    rank = (logits > logits.gather(1, tokens[:, None])).sum(dim=-1) + 1
    return largest, log_sum, rank


@score_tokens.check
def _(call: Call) -> None:
    check_rows("score_tokens", "logits", call.logits, FLOAT32)
    expect(
        "score_tokens",
        "tokens",
        call.tokens,
        call.logits.shape[:1],
        (torch.int64,),
        like=call.logits,
    )


def _accepts(call: Call) -> bool:
    near = call.logits.stride(1) == 1 and call.tokens.is_contiguous()
    return near and call.logits.shape[0] * -(-call.logits.shape[1] // CHUNK) <= gpu.MAX_GRID_YZ


@score_tokens.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = call.logits.shape
    chunks = -(-width // CHUNK)
    largest = gpu.empty((rows,), torch.float32, call.logits.device)
    log_sum = gpu.empty((rows,), torch.float32, call.logits.device)
    rank = gpu.empty((rows,), torch.int64, call.logits.device)
    if rows:
        found = gpu.empty((3, rows, chunks), torch.float32, call.logits.device)
        pdl = uses_pdl(call.logits.device, rows, chunks * WARPS)
        score_kernel[(rows * chunks,)](
            logits=call.logits,
            tokens=call.tokens,
            found=found,
            arrivals=counters(rows, call.logits.device),
            largest=largest,
            log_sum=log_sum,
            rank=rank,
            stride=call.logits.stride(0),
            width=width,
            chunks=chunks,
            programs=rows * chunks,
            CHUNK=CHUNK,
            CHUNKS=gpu.next_power_of_2(chunks),
            APART=STRIDE,
            PDL=pdl,
            num_warps=WARPS,
        )
    return largest, log_sum, rank
