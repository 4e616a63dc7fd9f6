"""apply_logit_bias and apply_penalties against scalar loops."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import apply_logit_bias, apply_penalties
from cairn.ops.sampling.launch import MAX_ROWS


def test_bias_adds_up_and_leaves_the_rest() -> None:
    logits = torch.randn(3, 10)
    before = logits.clone()
    index = torch.tensor([[0, 1], [2, 9], [0, 1]])
    apply_logit_bias(logits, index, torch.tensor([1.0, float("-inf"), 0.5]))
    before[0, 1] += 1.5
    before[2, 9] = float("-inf")
    torch.testing.assert_close(logits, before)


def test_penalties_against_scalars() -> None:
    torch.manual_seed(1)
    rows, vocabulary = 6, 40
    logits = torch.randn(rows, vocabulary) * 4
    prompt = torch.rand(rows, vocabulary) < 0.3
    counts = torch.randint(0, 4, (rows, vocabulary), dtype=torch.int32) * (
        torch.rand(rows, vocabulary) < 0.4
    )
    presence, frequency = torch.randn(rows), torch.randn(rows)
    repetition = torch.rand(rows) + 0.6
    expected = logits.clone()
    for row in range(rows):
        for token in range(vocabulary):
            value, count = logits[row, token].item(), int(counts[row, token])
            if prompt[row, token] or count:
                factor = repetition[row].item()
                value = value / factor if value > 0 else value * factor
            value -= frequency[row].item() * count
            value -= presence[row].item() * (count > 0)
            expected[row, token] = value
    apply_penalties(logits, prompt, counts.int(), presence, frequency, repetition)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1])
def test_more_rows_than_a_launch_has(rows: int, device: str) -> None:
    logits, counts = torch.ones(rows, 1, device=device), torch.ones(rows, 1, device=device).int()
    given = (logits, counts > 1, counts, *(torch.ones(rows, device=device) for _ in range(3)))
    assert apply_penalties.accepts("triton", *given) == (rows <= MAX_ROWS)
    apply_penalties(*given)
    assert torch.equal(logits, -torch.ones_like(logits))


def test_neutral_penalties_change_no_bit() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    counts = torch.randint(0, 3, (2, 50), dtype=torch.int32)
    zero = torch.zeros(2)
    apply_penalties(logits, counts > 1, counts, zero, zero, torch.ones(2))
    assert torch.equal(logits, before)


def test_forbidden_tokens_stay_forbidden() -> None:
    logits = torch.tensor([[float("-inf"), 1.0]])
    counts = torch.tensor([[3, 0]], dtype=torch.int32)
    one = torch.ones(1)
    apply_penalties(logits, counts > 5, counts, -one, -one, one * 2)
    assert logits[0].tolist() == [float("-inf"), 1.0]
