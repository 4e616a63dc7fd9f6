"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.testing import Cases, Make
from cairn.ops.top_k.fast_topk import fast_topk
from cairn.ops.top_k.fast_topk_transform_fused import fast_topk_transform_fused
from cairn.ops.top_k.fast_topk_transform_ragged_fused import fast_topk_transform_ragged_fused
from cairn.ops.top_k.fast_topk_v2 import fast_topk_v2
from cairn.ops.top_k.samples import rows_of


@fast_topk.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(5, 63), 7, 1)
    yield make.args(make.randn(5, 63), 1, 0)
    yield make.args(make.rand(4, 3, 100).to(torch.bfloat16).cumsum(-1), 1, -1)
    yield make.args(make.randn(3, 100)[:, ::2], 50, -1)
    yield make.args(make.randn(3, 2, 1500), 16, -1)
    yield make.args(make.randn(0, 8), 2, 1)


@fast_topk_transform_fused.cases
def _(make: Make) -> Cases:
    for number, (score, lengths, starts, topk) in enumerate(rows_of(make)):
        rows, width = score.shape
        size = (1, 7)[number % 2]
        table = make.randint(0, 1 << 20, 3, width // size + 3, dtype=torch.int32)[:, :-2]
        # In the last case, the first and the last row belong to no sequence.
        first = int(number == 6)
        bounds = make.tensor([first, rows // 2, rows // 2, rows - first], dtype=torch.int32)
        yield make.args(score, lengths, table, bounds, topk, starts, page_size=size)


@fast_topk_transform_ragged_fused.cases
def _(make: Make) -> Cases:
    for score, lengths, starts, topk in rows_of(make):
        offset = make.randint(0, 1 << 30, score.shape[0], dtype=torch.int32)
        yield make.args(score, lengths, offset, topk, starts)


@fast_topk_v2.cases
def _(make: Make) -> Cases:
    for score, lengths, starts, topk in rows_of(make):
        yield make.args(score, lengths, topk, starts)
    yield make.args(score, lengths, topk)
