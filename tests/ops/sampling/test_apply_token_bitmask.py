"""apply_token_bitmask against single bits."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import apply_token_bitmask


def words(rows: list[list[int]], width: int) -> torch.Tensor:
    """A bitmask that allows the tokens listed for each row."""
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        for token in tokens:
            mask[row, token // 32] |= 1 << (token % 32)
    return torch.where(mask > 2**31 - 1, mask - 2**32, mask).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_allowed_tokens_keep_their_logit(dtype: torch.dtype) -> None:
    allowed = [[0, 31, 32, 63, 64, 69], [], list(range(70))]
    logits = torch.randn(3, 70).to(dtype)
    before = logits.clone()
    apply_token_bitmask(logits, words(allowed, 3))
    for row, tokens in enumerate(allowed):
        for token in range(70):
            expected = before[row, token] if token in tokens else -torch.inf
            assert logits[row, token] == expected


def test_named_rows_change_and_others_do_not() -> None:
    logits = torch.randn(4, 40)
    before = logits.clone()
    apply_token_bitmask(logits, words([[1], [39]], 2), torch.tensor([3, 1]))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits.isfinite().nonzero()[-1].tolist() == [3, 1]
    assert logits[1].isfinite().nonzero().flatten().tolist() == [39]


def test_what_the_words_do_not_reach_is_left_alone() -> None:
    logits = torch.randn(1, 40)
    before = logits.clone()
    apply_token_bitmask(logits, words([[]], 1))
    assert logits[0, :32].eq(-torch.inf).all()
    assert torch.equal(logits[0, 32:], before[0, 32:])


def test_no_row_is_no_change() -> None:
    logits = torch.randn(2, 40)
    before = logits.clone()
    nothing = torch.zeros(0, 2, dtype=torch.int32)
    apply_token_bitmask(logits, nothing, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(logits, before)
