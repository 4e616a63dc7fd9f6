"""apply_token_bitmask_inplace_cuda against a loop over bits."""

from __future__ import annotations

import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops import apply_token_bitmask_inplace_cuda
from cairn.ops.grammar.apply_token_bitmask_inplace_cuda import BITS, mask_tokens
from tests.ops.sampling.variants import interpreted, runnable_on


def words(rows: list[list[int]], width: int) -> torch.Tensor:
    """A bitmask that allows the tokens listed for each row."""
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        for token in tokens:
            mask[row, token // 32] |= 1 << (token % 32)
    return torch.where(mask > 2**31 - 1, mask - 2**32, mask).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_allowed_tokens_keep_their_logit(dtype: torch.dtype) -> None:
    allowed = [[0, 31, 32, 63, 64, 69], [], list(range(70))]
    logits = torch.randn(3, 70).to(dtype)
    before = logits.clone()
    apply_token_bitmask_inplace_cuda(logits, words(allowed, 3))
    for row, tokens in enumerate(allowed):
        for token in range(70):
            expected = before[row, token] if token in tokens else -torch.inf
            assert logits[row, token] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_inside_a_row(dtype: torch.dtype, device: str) -> None:
    """Those of odd rows begin between two words of the mask."""
    logits = torch.randn(3, 2501, device=device).to(dtype)
    masks = torch.randint(-(1 << 31), 1 << 31, (3, 79), device=device, dtype=torch.int32)
    token = torch.arange(2501, device=device)
    allowed = masks[:, token // BITS] >> (token % BITS) & 1 == 1
    expected = logits.masked_fill(~allowed, -torch.inf)
    for name in runnable_on(mask_tokens, device):
        if interpreted(name, device) and dtype == torch.bfloat16:
            continue  # The interpreter has no constants in bfloat16.
        own = logits.clone()
        mask_tokens.using(name)(own, masks)
        assert torch.equal(own, expected), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_named_rows_of_both_change_and_others_do_not(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 40)
    before = logits.clone()
    masks = words([[0], [39], [2], [1]], 2)
    apply_token_bitmask_inplace_cuda(logits, masks, torch.tensor([3, 1], dtype=dtype))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [39]
    assert logits[3].isfinite().nonzero().flatten().tolist() == [1]


def test_a_single_row_needs_no_batch() -> None:
    logits = torch.randn(40)
    apply_token_bitmask_inplace_cuda(logits, words([[7, 33]], 2)[0])
    assert logits.isfinite().nonzero().flatten().tolist() == [7, 33]


def test_logits_beyond_the_mask_are_not_changed() -> None:
    logits = torch.randn(1, 40)
    before = logits.clone()
    apply_token_bitmask_inplace_cuda(logits, words([[]], 1))
    assert logits[0, :32].eq(-torch.inf).all()
    assert torch.equal(logits[0, 32:], before[0, 32:])


def test_no_row_is_no_change() -> None:
    logits = torch.randn(2, 40)
    before = logits.clone()
    nothing = torch.zeros(2, 2, dtype=torch.int32)
    apply_token_bitmask_inplace_cuda(logits, nothing, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "argument, given",
    [
        ("logits", (torch.zeros(2, 40, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32))),
        ("logits", (torch.zeros(1, 2, 40), torch.zeros(2, 2, dtype=torch.int32))),
        ("bitmask", (torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int64))),
        ("bitmask", (torch.zeros(2, 40), torch.zeros(3, 2, dtype=torch.int32))),
        (
            "indices",
            (torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2)),
        ),
    ],
)
def test_refuses(argument: str, given: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(BadArgument, match=f"`{argument}`"):
        apply_token_bitmask_inplace_cuda(*given)


@pytest.mark.parametrize("rows", [[0, 3], [-1]])
def test_rows_that_are_not_there_are_refused_on_the_cpu(rows: list[int]) -> None:
    logits, masks = torch.zeros(4, 40), torch.zeros(3, 2, dtype=torch.int32)
    for given in (rows, torch.tensor(rows)):
        with pytest.raises(BadArgument, match=f"`indices` holds {rows[-1]}, not numbers from"):
            apply_token_bitmask_inplace_cuda(logits, masks, given)
    assert not logits.any()
    with pytest.raises(BadArgument, match="`indices` holds 1, not numbers from 0 to 0"):
        apply_token_bitmask_inplace_cuda(logits[0], masks[0], [1])


def test_rows_may_be_a_list_of_numbers(device: str) -> None:
    logits = torch.randn(4, 40, device=device)
    before = logits.clone()
    masks = words([[0], [39], [2], [1]], 2).to(device)
    apply_token_bitmask_inplace_cuda(logits, masks, [3, 1])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [39]
    again = before.clone()
    apply_token_bitmask_inplace_cuda(again, masks, torch.tensor([3, 1]))
    assert torch.equal(again, logits)
    with torch.device("meta"):
        apply_token_bitmask_inplace_cuda(before, masks, [3, 1])
    assert torch.equal(before, logits)


def test_the_module_has_the_functions_by_the_names_that_peers_have_there() -> None:
    assert ops.grammar.__all__ == ["apply_token_bitmask_inplace_cuda"]
    assert ops.grammar.apply_token_bitmask_inplace_cuda is apply_token_bitmask_inplace_cuda
