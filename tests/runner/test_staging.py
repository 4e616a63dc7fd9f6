"""Numbers that travel between host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.runner.staging import ALIGNMENT, Arriving, send

ARRAYS = (
    np.arange(5),
    np.array([0.5, -2.0, 3.25], dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:],
    np.array([1 << 62]),
)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device")])],
)  # fmt: skip
def test_arrays_arrive_as_they_are(device):
    found = send(ARRAYS, torch.device(device))
    assert len(found) == len(ARRAYS)
    for tensor, array in zip(found, ARRAYS, strict=True):
        assert tensor.device.type == device
        np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)
        if device != "cpu":
            assert tensor.data_ptr() % ALIGNMENT == 0


def test_nothing_to_send():
    assert send((), torch.device("cpu")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_arrive_as_they_were_when_they_were_sent():
    tokens = torch.arange(64, device="cuda")
    first = Arriving(tokens)
    tokens += 1
    second = Arriving(tokens)
    tokens.zero_()
    assert second.tokens() == list(range(1, 65))
    assert first.tokens() == list(range(64))


def test_tokens_of_the_cpu():
    assert Arriving(torch.tensor([3, -1])).tokens() == [3, -1]
    assert Arriving(torch.empty(0, dtype=torch.int64)).tokens() == []
