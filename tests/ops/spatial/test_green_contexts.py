"""Streams with separate sets of SMs."""

from __future__ import annotations

import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument, BadConfig


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu() -> None:
    with pytest.raises(BadConfig, match="no CUDA device is here"):
        ops.get_sm_available()
    with pytest.raises(BadConfig, match="no CUDA device is here"):
        ops.create_greenctx_stream_by_value(8, 8)
    with pytest.raises(BadArgument, match="`SM_a` is 0, not 1 or more"):
        ops.create_greenctx_stream_by_value(0, 8)


@pytest.mark.gpu
def test_both_streams_compute() -> None:
    count = ops.get_sm_available()
    assert count > 16
    first, second = ops.create_greenctx_stream_by_value(16, count - 32)
    x = torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    results = []
    for stream in (first, second):
        with torch.cuda.stream(stream):
            results.append(x @ x)
    torch.cuda.synchronize()
    assert torch.equal(results[0], results[1])
    with pytest.raises(BadArgument, match="multiprocessors"):
        ops.create_greenctx_stream_by_value(count, 8)
