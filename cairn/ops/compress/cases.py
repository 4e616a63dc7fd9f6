"""Test cases of this family's ops."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cairn.ops.compress.compress_windows import compress_windows
from cairn.ops.compress.norm_rope_tail import norm_rope_tail
from cairn.ops.testing import Arguments, Cases, Make


@norm_rope_tail.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        x, angles = make.randn(5, 3, 24, dtype=dtype), make.randn(5, 8)
        yield make.args(x, angles, None, 1e-6)
        yield make.args(x, angles, make.randn(24), 1e-2)
        yield make.args(x, angles, inverse=True, dtype=torch.bfloat16)
        wide = make.randn(3, 5 * 48, dtype=dtype)[:, 7:103].unflatten(1, (2, 48))
        yield make.args(wide, make.randn(3, 48), make.randn(48, dtype=dtype), 1e-6)
        yield make.args(make.randn(2, 4, 512, dtype=dtype), make.randn(2, 64), eps=1e-6)
    yield make.args(make.randn(0, 4, 16), make.randn(0, 8))


class _Kind(NamedTuple):
    """Page size, tokens per window, elements per entry, and windows per entry (1 or 2)."""

    size: int
    rate: int
    dim: int
    parts: int


def _windows(
    make: Make,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    kind: _Kind,
    dtype: torch.dtype,
) -> Arguments:
    """Arguments for the last tokens of some rows and one padding token."""
    size, rate, dim, parts = kind
    wide = parts * dim
    # One column more, so that the inputs are a strided view.
    paged = make.paged(lengths, 1, size, 2 * wide + 4)
    row, slot, _ = paged.queries(counts)
    row, slot = (torch.cat((x, x.new_full((1,), n))) for x, n in ((row, 0), (slot, -1)))
    return make.args(
        paged.k_cache.squeeze(1)[..., : 2 * wide],
        paged.page_table,
        row,
        slot,
        make.randn(rate, wide),
        make.randn(dim, dtype=dtype),
        1e-6,
        make.randn(len(slot), dim // 4 * 2),
        dtype,
    )


@compress_windows.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield _windows(make, (9, 2, 16), (9, 2, 5), _Kind(4, 4, 12, 2), dtype)
        yield _windows(make, (17, 8), (17, 1), _Kind(4, 8, 12, 1), dtype)
        yield _windows(make, (7, 13), (7, 3), _Kind(4, 3, 12, 2), dtype)
    yield _windows(make, (37, 130), (37, 3), _Kind(16, 128, 128, 1), torch.float32)
    yield _windows(make, (3,), (3,), _Kind(4, 4, 8, 2), torch.float32)
