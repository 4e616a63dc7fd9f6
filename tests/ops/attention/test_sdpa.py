"""Dense attention by torch's kernels: the one for the CPU stands for the GPU's, the rest is one."""

from __future__ import annotations

import pytest
import torch

from cairn.ops.attention import sdpa
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.tuning import TUNING
from cairn.ops.testing import Arguments, Make, check

LENGTHS, COUNTS = (9, 0, 300, 64, 129, 21), (1, 0, 40, 64, 2, 5)


def step(dtype: torch.dtype, quantized: bool = False, scale: float | None = None) -> Arguments:
    make = Make()
    paged = make.paged(LENGTHS, 2, 16, 32, dtype=dtype)
    row, slot, _ = paged.queries(COUNTS)
    q = make.randn(sum(COUNTS), 6, 32, dtype=dtype)
    stored = paged.quantized() if quantized else paged
    given = (q, stored.k_cache, stored.v_cache, row, slot, paged.page_table)
    return make.args(*given, scale=scale, stretches=paged.stretches(COUNTS))


@pytest.mark.parametrize("pages", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_any_size(dtype, pages, tuned):
    tuned(TUNING, sdpa_block_bytes=pages * dtype.itemsize * 6 * 16 * 32)
    check(dense_attention, "sdpa", step(dtype))


def test_scale_and_quantized_pages():
    check(dense_attention, "sdpa", step(torch.float32, scale=0.3))
    check(dense_attention, "sdpa", step(torch.bfloat16, quantized=True))


def test_what_torch_is_given():
    q = torch.zeros(3, 2, 16)
    assert sdpa.accepts(q, [0, 0, 3], False)
    assert not sdpa.accepts(q, None, False)
    assert not sdpa.accepts(q, [0, 0, 3], True)
    assert not sdpa.accepts(q[..., :12], [0, 0, 3], False)
