"""Transfers of small arrays between host and device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cairn.runner.staging import ALIGNMENT, RING, Arriving, Lines, send

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lines_of_steps_that_are_on_their_way_at_once():
    """Each step reads its own arrays, however many were sent before it ran, and returns its tokens
    although later ones were sampled; unchanged arrays are among them."""
    device, rng = torch.device("cuda"), random.Random(3)
    lines = Lines([7, -1, 0], 32, device)
    rows = [np.arange(n) for n in (4, 9)]
    ahead, chosen = [], torch.zeros(32, dtype=torch.int64, device=device)
    last_token, place = torch.zeros_like(chosen), torch.arange(32, device=device).flip(0)
    kept = torch.ones(32, dtype=torch.bool, device=device)
    for step in range(200):
        row = rows[rng.random() < 0.1]
        cells = np.arange(rng.choice([0, 0, 0, 3]))
        pages = np.full(len(cells), step, dtype=np.int32)
        if rng.random() < 0.1:
            # Does not affect the steps in flight.
            lines.fetch(3, 32, rehearsal=True)
            lines.answer(chosen, torch.zeros_like(chosen), place, rehearsal=True)
            assert lines.device.tolist() == [[7] * 32, [-1] * 32, [0] * 32]
        trip = lines.send((row, cells, pages))
        if rng.random() < 0.3:
            torch.cuda._sleep(300_000)
        lines.fetch(3, 32)
        # A step's tokens depend on the arrays that were sent to it.
        chosen.copy_(lines.device[0] * 1000 + lines.device[1] * 10 + step)
        chosen += lines.device[2].view(torch.int32)[:32]
        count = rng.choice([len(row), 32])
        lines.answer(chosen[:count], last_token, place[:count])
        trip.returns(len(row))
        # Read at the end, because nothing waits here.
        kept &= (last_token.flip(0) == chosen) | (torch.arange(32, device=device) >= count)
        sent = [np.full(32, padding) for padding in (7, -1, 0)]
        for line, array in zip(sent, (row, cells, pages), strict=True):
            line[: len(array)] = array
        ahead.append((trip, (sent[0] * 1000 + sent[1] * 10 + step + sent[2])[: len(row)].tolist()))
        if len(ahead) > rng.randrange(RING + 2):
            arrived, wanted = ahead.pop(0)
            assert arrived.tokens() == wanted
    assert kept.all()
