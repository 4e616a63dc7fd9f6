"""Verification of chains of drafted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INT64, check_min, expect
from cairn.ops.registry import op
from cairn.ops.speculative.kernels import chains_kernel


@op
def verify_chains(tokens: Tensor, given: Tensor, row: Tensor, nobody: int) -> Tensor:
    """The accepted length of each chain: up to the first chosen token that differs from the next
    draft token.

    A chain is an entry with given < 0 and the entries with given >= 0 after it, which hold drafted
    tokens. An entry counts if each draft from its chain's start up to itself equals the token
    chosen at the entry before that draft. Greedy or drawn, tokens are chosen as without drafts, so
    those that count are those of plain decoding.

    Args:
        tokens: [T] int64, the token chosen after each entry; -1: none.
        given: [T] int64, see `decode_slots`.
        row: [T] int64, rows of the entries.
        nobody: row index that stands for no row.
    Returns:
        [2, T] int64: at the last entry of each chain that counts its row and how many of the
        chain's entries count; at others `nobody` and 0.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    index = torch.arange(len(tokens), device=tokens.device)
    begins = (given < 0) | (index == 0)
    start = torch.where(begins, index, 0).cummax(0).values
    before = (~begins & (tokens.roll(1) != given)).long().cumsum(0)
    counts = before == before[start]
    # A sentinel after the last entry begins a chain.
    more = torch.cat((~begins & counts, begins.new_zeros(1)))[1:]
    last = counts & ~more
    number = index - start + 1
    return torch.stack((torch.where(last, row, nobody), torch.where(last, number, 0)))


@verify_chains.check
def _(call: Call) -> None:
    expect("verify_chains", "tokens", call.tokens, 1, INT64, dense=-1)
    for name, tensor in (("given", call.given), ("row", call.row)):
        expect("verify_chains", name, tensor, call.tokens.shape, INT64, call.tokens, dense=-1)
    check_min("verify_chains", "nobody", call.nobody, 0)


@verify_chains.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> Tensor:
    count = len(call.tokens)
    out = gpu.empty((2, count), torch.int64, call.tokens.device)
    if count:
        chains_kernel[(count,)](
            tokens=call.tokens,
            given=call.given,
            row=call.row,
            out=out,
            nobody=call.nobody,
            count=count,
            num_warps=1,
        )
    return out
