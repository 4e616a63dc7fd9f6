"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.flash_mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from cairn.ops.flash_mla.flash_mla_with_kvcache import flash_mla
from cairn.ops.sparse_mla import records
from cairn.ops.testing import Cases, Make


@flash_mla.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, latent, rope in (
        (torch.float32, 4, 3, 128, 16),
        (torch.bfloat16, 16, 8, 256, 32),
    ):
        cache = make.randn(9, size, 1, latent + rope, dtype=dtype)
        table = make.tensor([[3, 1, 0], [8, 2, 5]], torch.int32)
        lengths = make.tensor([2 * size + 1, 1], torch.int32)
        q = make.randn(2, 3, heads, latent + rope, dtype=dtype)
        for causal in (False, True):
            yield make.args(q, cache, table, lengths, latent, 0.1, causal)
        cells = make.randint(0, 9 * size, 2, 3, 20, dtype=torch.int32)
        cells[0, 1], cells[1, 2, ::3] = -1, 1 << 30
        yield make.args(q, cache, None, None, latent, 0.1, False, cells)
        parts = (part.flatten(0, 2) for part in cache.split((latent, rope), dim=-1))
        small = records.quantize(*parts).view(9, size, 1, -1)
        yield make.args(q, small, None, None, latent, 0.1, False, cells)
        yield make.args(q[:, :0], cache, None, None, latent, 0.1, False, cells[:, :0])


@flash_mla_sparse_fwd.cases
def _(make: Make) -> Cases:
    for dtype, heads, value, width in ((torch.float32, 3, 128, 144), (torch.bfloat16, 8, 64, 80)):
        q, kv = make.randn(5, heads, width, dtype=dtype), make.randn(30, 1, width, dtype=dtype)
        indices = make.randint(0, 30, 5, 1, 17, dtype=torch.int32)
        indices[1], indices[3, 0, ::2] = -1, 30
        yield make.args(q, kv, indices, 0.1, value)
        yield make.args(q[:0], kv, indices[:0], 0.1, value)
