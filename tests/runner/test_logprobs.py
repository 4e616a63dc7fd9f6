"""Log-probability reports of many tokens at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn import types
from cairn.runner import logprobs
from cairn.runner.logprobs import Reported, largest, lines_of
from cairn.types import Alternatives

VOCAB = 50


def lines(n: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.log_softmax(values, -1)


def reported(values: torch.Tensor, token: int, wanted: int) -> Alternatives:
    [entry] = Reported.of(values[None], torch.tensor([token]), [wanted]).entries()
    return entry


def equal(one: Alternatives, other: Alternatives) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_token_taken_stands_among_the_most_likely():
    values = torch.log_softmax(torch.tensor([1.0, 3.0, 2.0, 0.0]), -1)
    some = reported(values, 3, 2)
    assert some.ids == (1, 2, 3)
    assert some.ranks == (1, 2, 4)
    np.testing.assert_array_equal(some.values, values[[1, 2, 3]])
    assert some.chosen == float(values[3])
    assert reported(values, 1, 2).ids == (1, 2)
    assert reported(values, 0, 0).ids == (0,)
    assert reported(values, 0, 0).ranks == (3,)
    assert reported(values, 0, -1).ids == (1, 2, 0, 3)
    assert reported(values, 0, 99).ranks == (1, 2, 3, 4)


def test_equals_stand_by_their_ids():
    values = torch.full((VOCAB,), -4.0)
    values[[30, 7]] = -1.0
    assert reported(values, 9, 4).ids == (7, 30, 0, 1, 9)
    assert reported(values, 9, 4).ranks == (1, 2, 3, 4, 3)


@pytest.mark.parametrize("listed_below", [3, 256])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_many_are_reported_as_each_alone(monkeypatch, block, listed_below):
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 4 * VOCAB * block)
    monkeypatch.setattr(types, "LISTED_BELOW", listed_below)
    values, wanted = lines(11), [2, 0, 5, -1, 2, 2, 0, 99, 5, 1, 2]
    values[:, 40:] = values[:, :10]
    tokens = torch.arange(0, 44, 4)
    found = Reported.of(values, tokens, wanted).entries()
    assert len(found) == len(wanted)
    for i, entry in enumerate(found):
        assert equal(entry, reported(values[i], int(tokens[i]), wanted[i]))


@pytest.mark.parametrize("most", [5, 32, 99])
def test_lines_of_a_step_say_the_same_of_some_of_its_rows(monkeypatch, most):
    monkeypatch.setattr(logprobs, "MAX_GRAPH_LOGPROBS", most)
    values, tokens = lines(9), torch.arange(0, 45, 5)
    values[:, 40:] = values[:, :10]
    tokens[4] = -1
    rows, wanted = [0, 2, 3, 4, 8], [2, 0, 5, 2, 0]
    found = Reported.of_lines(lines_of(values, tokens), rows, wanted).entries()
    expected = Reported.of(values[rows], tokens[rows], wanted).entries()
    assert all(equal(one, other) for one, other in zip(found, expected, strict=True))


def test_columns_of_lines():
    values, tokens = lines(3), torch.tensor([1, 2, 3])
    one = lines_of(values, tokens)
    assert one.dtype == torch.int32 and one.shape == (3, 2 * (32 + 1) + 1)
    assert one[:, 32].tolist() == [1, 2, 3]


def test_where_no_token_was_taken_something_is_reported():
    [entry] = Reported.of(lines(1), torch.tensor([-1]), [3]).entries()
    assert 3 <= len(entry.ids) <= 4


def test_one_entry_does_not_keep_the_others_alive(monkeypatch):
    monkeypatch.setattr(types, "LISTED_BELOW", 2)
    entries = Reported.of(lines(5), torch.zeros(5, dtype=torch.int64), [2] * 5).entries()
    for entry in entries:
        assert all(column.base is None for column in (entry.ids, entry.values))


@pytest.mark.parametrize("most", [3, 4096])
def test_largest_is_a_stable_sort(monkeypatch, most):
    monkeypatch.setattr(logprobs, "MAX_CHOSEN", most)
    values = torch.tensor([[0.0, -1.0, 2.5, -torch.inf, 2.5, 0.0, -3.0, torch.inf, -1.0]])
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    for count in range(10):
        assert torch.equal(largest(values, count), order[:, :count])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 3, 64, 200])
def test_a_gpu_reports_the_same_of_as_many_as_there_are(rows):
    """Equal logits are frequent with 8 bits of mantissa."""
    values = (torch.randn(rows, 100_278, device="cuda") * 3).bfloat16().float()
    tokens = torch.randint(0, 100_278, (rows,), device="cuda")
    wanted = [(20, 0, 5, 1)[i % 4] for i in range(rows)]
    found = Reported.of(values, tokens, wanted)
    in_lines = Reported.of_lines(lines_of(values, tokens), range(rows), wanted)
    here = Reported.of(values.cpu(), tokens.cpu(), wanted).entries()
    values.zero_()
    for got, want in zip([*found.entries(), *in_lines.entries()], [*here, *here], strict=True):
        assert list(got.ids) == list(want.ids) and list(got.ranks) == list(want.ranks)
        np.testing.assert_allclose(got.values, want.values, atol=4e-6)
