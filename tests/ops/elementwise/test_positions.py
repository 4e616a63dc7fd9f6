"""clamp_position, resolve_future_token_ids and fixup_zero_kv_rows against loops; copies."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops import (
    clamp_position,
    copy_to_gpu_no_ce,
    fixup_zero_kv_rows,
    gpu,
    resolve_future_token_ids,
)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_clamp_position(count: int, dtype: torch.dtype) -> None:
    lengths = torch.randint(-2, 5, (count,), dtype=dtype)
    got = clamp_position(lengths)
    assert got.dtype == dtype
    assert got.tolist() == [max(length - 1, 0) for length in lengths.tolist()]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_resolve_future_token_ids(count: int, dtype: torch.dtype) -> None:
    future = torch.randint(0, 1 << 17, (30,), dtype=dtype)
    ids = torch.randint(-29, 100, (count,), dtype=dtype)
    expected = [int(future[-i]) if i < 0 else i for i in ids.tolist()]
    assert resolve_future_token_ids(ids, future) is None
    assert ids.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_keys(dtype: torch.dtype) -> None:
    out, lse = torch.randn(10, 3, 5).to(dtype), torch.randn(10, 3)
    out[2], lse[2] = math.nan, math.nan
    kept = out.clone(), lse.clone()
    lens = [4, 0, 0, 1, 0]
    first = [0, 2, 5, 5, 6, 9]
    fixup_zero_kv_rows(
        out, lse, torch.tensor(lens), torch.tensor(first, dtype=torch.int32), max_seq_len=3
    )
    empty = {t for i, n in enumerate(lens) if n == 0 for t in range(first[i], first[i + 1])}
    assert empty == {2, 3, 4, 6, 7, 8}
    for token in range(10):
        if token in empty:
            assert out[token].count_nonzero() == 0
            assert lse[token].tolist() == [-math.inf] * 3
        else:
            assert torch.equal(out[token], kept[0][token])
            assert torch.equal(lse[token], kept[1][token])


@pytest.mark.parametrize("more", [0, 1])
def test_more_requests_than_a_launch_has(more: int, device: str) -> None:
    requests = gpu.MAX_GRID_YZ + more
    lens = torch.zeros(requests, dtype=torch.int32, device=device)
    given = (torch.ones(2, 1, 1, device=device), torch.ones(2, 1, device=device), lens)
    first = torch.full((requests + 1,), 2, dtype=torch.int32, device=device)
    first[:-1] = 1
    args = (*given, first, 1)
    assert fixup_zero_kv_rows.accepts("triton", *args) == (more == 0)
    fixup_zero_kv_rows(*args)
    assert given[0].flatten().tolist() == [1, 0]


@pytest.mark.parametrize("count", [0, 64, 72, 1000])
def test_copy(count: int, device: str) -> None:
    given = torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int32)
    out = torch.zeros(count, dtype=torch.int32, device=device)
    copy_to_gpu_no_ce(given, out)
    assert torch.equal(out.cpu(), given)
