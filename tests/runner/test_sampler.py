"""From logits to tokens, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.runner.sampler import Choice, Picks, Sampler
from cairn.runner.staging import send
from cairn.runner.step import NO_MASKS, Masks, RowOpen, RowWork, StepPlan
from cairn.types import SamplingParams

VOCAB = 50


def opened(row: int, seed: int = 0, stop_ids=(), history=(), num_prompt=0, **params) -> RowOpen:
    return RowOpen(row, f"r{row}", SamplingParams(**params), seed, history, num_prompt, stop_ids)


def work(row: int, index: int = 0) -> RowWork:
    return RowWork(row, 0, [0], sample=True, output_index=index)


def picks(*works: RowWork) -> Picks:
    return Picks.of(StepPlan(0, (), (), (), works))


def sampler(*rows: RowOpen) -> Sampler:
    found = Sampler(VOCAB, 8, torch.device("cpu"))
    for row in rows:
        found.open(row)
    return found


def logits(n: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(
    found: Sampler, values: torch.Tensor, *works: RowWork, masks: Masks = NO_MASKS
) -> list[int]:
    return chosen(found, values.clone(), picks(*works), masks).tokens.tolist()


def chosen(found: Sampler, values: torch.Tensor, which: Picks, masks: Masks = NO_MASKS) -> Choice:
    draws = found.draws(which)
    sent = None if draws is None else send(draws, found.device)
    return found.sample(values, which, sent, masks)


def test_nothing_to_sample():
    assert chosen(sampler(), torch.empty(0, VOCAB), picks()).tokens.tolist() == []


def test_results_stand_in_the_order_of_the_works():
    found = sampler(*(opened(r, temperature=0) for r in range(5)))
    values = logits(3)
    tokens = drawn(found, values, work(4), work(0), work(2))
    assert tokens == values.argmax(-1).tolist()


def test_a_draw_depends_on_seed_and_index_alone():
    """Independent of row, batch and earlier use of the sampler."""
    values = logits() / 3
    tokens = [drawn(sampler(opened(0, seed=9)), values, work(0, i))[0] for i in range(30)]
    assert len(set(tokens)) > 5
    crowd = sampler(*(opened(r, seed=r) for r in range(6)), opened(6, seed=9))
    mixed = torch.cat([logits(6, seed=1), values])
    for i, token in enumerate(tokens):
        assert drawn(crowd, mixed, *(work(r, 3) for r in range(6)), work(6, i))[6] == token
    other = [drawn(sampler(opened(0, seed=10)), values, work(0, i))[0] for i in range(30)]
    assert tokens != other


@pytest.mark.parametrize("seed", [2**64 - 1, 2**64 + 5, -1, -(2**63)])
def test_any_integer_is_a_seed(seed):
    assert 0 <= drawn(sampler(opened(0, seed=seed)), logits(), work(0))[0] < VOCAB


def test_a_row_is_forgotten_when_it_is_opened_again():
    values = torch.zeros(1, VOCAB)
    values[0, 3] = 1.0
    found = sampler(opened(0, temperature=0, presence_penalty=2.0))
    assert drawn(found, values, work(0)) == [3]
    assert drawn(found, values, work(0, 1)) != [3]
    found.open(opened(0, temperature=0, presence_penalty=2.0))
    assert drawn(found, values, work(0)) == [3]
    found.close(0)
    found.close(0)
    with pytest.raises(KeyError):
        found.params(0)


def test_opening_a_row_invalidates_cached_parameters():
    found, values, which = sampler(opened(3, temperature=0)), logits(), picks(work(3))
    assert chosen(found, values.clone(), which).tokens.tolist() == [int(values.argmax())]
    found.open(opened(3, temperature=0, logit_bias={7: 100.0}, logprobs=1))
    choice = chosen(found, values.clone(), which)
    assert choice.tokens.tolist() == [7]
    assert list(choice.report.logprobs()) == [0]


def test_which_rows_are_reported_and_how_much_of_them():
    found = sampler(
        opened(0, temperature=0),
        opened(1, temperature=0, logprobs=2),
        opened(2, temperature=0, logprobs=-1),
        opened(3, temperature=0.5, logprobs=0, logit_bias={7: 1.0}),
    )
    three, two = picks(work(2), work(0), work(1)), picks(work(0), work(3))
    assert found.reports(three) == ([0, 2], [VOCAB, 2])
    assert found.reports(two) == ([1], [0])
    assert found.reports(picks(work(0))) == ([], [])
    # Values that are only reported; the tokens depend on the logits.
    assert found.plain(three) and not found.plain(two)
    found.open(opened(4, temperature=0, logprobs=1, min_tokens=2))
    assert [found.plain(picks(work(1, i), work(4, i))) for i in range(4)] == [0, 0, 1, 1]
    assert found.draws(three) is None and found.draws(two) is not None
    always = found.draws(three, always=True)
    assert always is not None and always.temperature.tolist() == [0.0] * 3


def test_history_after_a_retraction_counts_as_if_it_had_run():
    values = logits(seed=3)
    params = {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.6}
    params["repetition_penalty"] = 1.3
    prompt = [1, 2, 2]
    steady = sampler(opened(0, history=prompt, num_prompt=3, **params))
    tokens = [drawn(steady, values, work(0, i))[0] for i in range(12)]
    assert len(set(tokens)) > 4
    for at in (1, 5, 11):
        resumed = sampler(opened(0, history=prompt + tokens[:at], num_prompt=3, **params))
        assert drawn(resumed, values, work(0, at)) == [tokens[at]]


def test_repetition_counts_the_prompt_and_presence_does_not():
    values = torch.zeros(1, VOCAB)
    values[0, :2] = torch.tensor([2.0, 1.9])
    for params, token in (
        ({"repetition_penalty": 1.5}, 1),
        ({"presence_penalty": 1.5}, 0),
        ({"frequency_penalty": 1.5}, 0),
    ):
        found = sampler(opened(0, temperature=0, history=[0], num_prompt=1, **params))
        assert drawn(found, values, work(0)) == [token]


def test_stop_ids_are_forbidden_before_min_tokens():
    values = torch.zeros(1, VOCAB)
    values[0, 7] = 9.0
    found = sampler(opened(0, temperature=0, min_tokens=2, stop_ids=(7,)))
    assert [drawn(found, values, work(0, i))[0] == 7 for i in range(4)] == [0, 0, 1, 1]


def test_bias_and_ban_meet_in_one_row():
    found = sampler(
        opened(0, temperature=0, min_tokens=1, stop_ids=(7, 8), logit_bias={7: 100.0, 9: 50.0})
    )
    assert drawn(found, logits(), work(0)) == [9]


@pytest.mark.parametrize(
    "name", ["logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_whole_numbers_are_numbers(name):
    changed = []
    for number in (2, 2.0):
        params = {name: {9: number} if name == "logit_bias" else number}
        found = sampler(opened(0, temperature=0, history=[9], **params))
        changed.append(logits())
        chosen(found, changed[-1], picks(work(0)))
    assert torch.equal(*changed)
    assert not torch.equal(changed[0], logits())


def test_a_filter_of_one_row_does_not_touch_another():
    values = logits(2)
    free = sampler(opened(0, seed=5), opened(1, seed=6))
    narrow = sampler(opened(0, seed=5, top_k=1), opened(1, seed=6))
    for i in range(20):
        a, b = drawn(narrow, values, work(0, i), work(1, i))
        assert a == int(values[0].argmax())
        assert b == drawn(free, values, work(0, i), work(1, i))[1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30])
def test_the_coldest_draw_is_the_largest_logit(temperature):
    values = logits(seed=4)
    found = sampler(opened(0, temperature=temperature))
    for i in range(10):
        assert drawn(found, values, work(0, i)) == [int(values.argmax())]


def test_the_hottest_draw_is_even():
    values = logits(seed=4)
    found = sampler(opened(0, temperature=1e300, stop_ids=(3,), min_tokens=10**6, max_tokens=None))
    tokens = {drawn(found, values, work(0, i))[0] for i in range(2000)}
    assert tokens == set(range(VOCAB)) - {3}


def test_logprobs_belong_to_the_rows_that_want_them():
    found = sampler(
        opened(0, temperature=0),
        opened(1, temperature=0, logprobs=2, logit_bias={5: 100.0}),
        opened(2, temperature=0, logprobs=-1),
    )
    values = logits(3)
    raw = torch.log_softmax(values, -1)
    choice = chosen(found, values.clone(), picks(work(0), work(1), work(2)))
    assert set(choice.report.logprobs()) == {1, 2}
    biased, whole = choice.report.logprobs()[1], choice.report.logprobs()[2]
    assert choice.tokens[1] == 5
    assert biased.chosen == pytest.approx(float(raw[1, 5]))
    assert len(whole.ids) == VOCAB
    np.testing.assert_allclose(whole.values, raw[2].sort(descending=True).values)


def mask(*allowed: int) -> np.ndarray:
    words = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def test_a_mask_leaves_only_its_tokens_and_other_rows_alone():
    found = sampler(opened(0), opened(1, temperature=0), opened(2, seed=5), opened(3, top_k=1))
    values = logits(4)
    free = drawn(found, values, *(work(r) for r in range(4)))
    masks = {0: mask(3, 31, 49), 1: mask(32), 3: mask(7, 8)}
    for i in range(20):
        tokens = drawn(found, values, *(work(r, i) for r in range(4)), masks=masks)
        assert tokens[0] in (3, 31, 49) and tokens[1] == 32 and tokens[3] in (7, 8)
    assert drawn(found, values, *(work(r) for r in range(4)), masks=masks)[2] == free[2]


def test_a_mask_stands_above_bias_and_penalties():
    found = sampler(
        opened(0, logit_bias={9: 100.0}, repetition_penalty=1e9, history=[5], num_prompt=1)
    )
    assert drawn(found, logits(), work(0), masks={0: mask(5)}) == [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_mask_and_min_tokens_leave_nothing_no_token_is_chosen(temperature):
    found = sampler(opened(0, temperature=temperature, min_tokens=3, stop_ids=(4,)))
    assert drawn(found, logits(), work(0), masks={0: mask(4)}) == [-1]
    assert drawn(found, logits(), work(0, 3), masks={0: mask(4)}) == [4]


def test_reported_log_probabilities_know_no_mask():
    found = sampler(opened(0, logprobs=2), opened(1, logprobs=2))
    values = logits(1).repeat(2, 1)
    choice = chosen(found, values.clone(), picks(work(0), work(1)), {1: mask(11)})
    free, bound = choice.report.logprobs()[0], choice.report.logprobs()[1]
    expected = torch.log_softmax(values[1], dim=-1)
    assert choice.tokens[1] == 11
    assert bound.chosen == pytest.approx(expected[11].item(), abs=1e-5)
    assert list(bound.ids[:2]) == list(free.ids[:2])


def test_a_row_forgets_the_penalties_of_the_one_before():
    values = torch.zeros(1, VOCAB)
    values[0, :2] = torch.tensor([2.0, 1.9])
    penalised = opened(0, temperature=0, presence_penalty=2.0, history=[0])
    found = sampler(penalised)
    assert drawn(found, values, work(0)) == [1]
    found.open(opened(0, temperature=0, logit_bias={9: 0.5}))
    assert drawn(found, values, work(0)) == [0]
    found.open(penalised)
    found.close(0)
    assert found._penalties.among([0]) == []
