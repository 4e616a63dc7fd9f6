"""Parameters and outputs."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from cairn.errors import BadRequest, CairnError, TooLong
from cairn.types import (
    FinishReason,
    Logprob,
    LogprobColumns,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
)


def test_defaults():
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, 16)
    assert not params.greedy
    assert not params.penalized
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    "given", [{"presence_penalty": 0.1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}]
)
def test_penalized(given):
    assert SamplingParams(**given).penalized


def test_lists_are_kept_as_values():
    stops, bias = ["a", "b"], {5: 1.0}
    params = SamplingParams(stop=stops, stop_token_ids=[3, 4], logit_bias=bias)
    stops.append("c")
    bias[6] = 2.0
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {5: 1.0}
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_values_do_not_change():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0
    assert dataclasses.replace(params, temperature=0.5).temperature == 0.5
    assert copy.deepcopy(params) == params


@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"min_tokens": 16},
        {"logprobs": -1},
        {"prompt_logprobs": 0},
        {"presence_penalty": -2},
        {"frequency_penalty": 2.0},
    ],
    ids=str,
)
def test_limits_are_inside(given):
    SamplingParams(**given)


def test_min_above_max():
    with pytest.raises(BadRequest, match="min_tokens is 17, more than max_tokens"):
        SamplingParams(min_tokens=17)


def test_positional_parameters_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_token_logprobs_is_a_mapping():
    entry = TokenLogprobs([9, 4, 7], [-0.5, -1.5, -8.0], [1, 2, 30], decode=lambda t: f"<{t}>")
    assert list(entry) == [9, 4, 7]
    assert len(entry) == 3
    assert entry[7] == Logprob(-8.0, 30, "<7>")
    assert 5 not in entry
    assert entry.get(5) is None
    with pytest.raises(KeyError):
        entry[5]
    assert dict(entry)[4].rank == 2
    assert "Logprob" in repr(entry)
    assert TokenLogprobs([1], [-1.0], [1])[1].decoded_token is None


def test_finish_reasons_are_their_names():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_errors_know_their_status_and_hint():
    error = TooLong("9 tokens", "Shorten it")
    assert str(error) == "9 tokens. Shorten it"
    assert (error.message, error.hint, error.http_status) == ("9 tokens", "Shorten it", 400)
    assert isinstance(error, BadRequest | CairnError | ValueError)
    assert str(CairnError("alone")) == "alone"
    assert CairnError("x").http_status == 500


def columns(*tokens):
    """Token 1 is the likeliest, then 2; the sampled ones are `tokens`, with rank 9 if not among
    them."""
    ids = np.array([[1, 2, token] for token in tokens])
    ranks = np.array([token if token in (1, 2) else 9 for token in tokens])
    return LogprobColumns(ids, -ids.astype(np.float32), ranks)


def test_prompt_logprobs_are_a_sequence():
    entries = PromptLogprobs(6, decode=str)
    entries.put(1, columns(7, 1))
    entries.put(3, columns(2))
    assert len(entries) == 6
    assert entries[0] is None and entries[4] is None and entries[-1] is None
    assert list(entries[1]) == [1, 2, 7] and entries[1][7] == Logprob(-7.0, 9, "7")
    assert list(entries[2]) == [1, 2] and entries[-3][2] == Logprob(-2.0, 2, "2")
    assert [entry and list(entry) for entry in entries[2:5]] == [[1, 2], [1, 2], None]
    assert entries == list(entries) and entries != list(entries)[:-1]
    assert repr(entries) == repr(list(entries))
    with pytest.raises(IndexError):
        entries[6]


def test_prompt_logprobs_begin_anew():
    entries = PromptLogprobs(4)
    entries.put(1, columns(7, 7))
    with pytest.raises(ValueError, match="from token 4 on do not follow token 2"):
        entries.put(4, columns(7))
    entries.put(1, columns(8))
    assert list(entries[1]) == [1, 2, 8] and entries[2] is None
    entries.put(2, columns(8, 1))
    assert [list(entry) for entry in entries[1:]] == [[1, 2, 8], [1, 2, 8], [1, 2]]
    assert [len(part) for part in entries.parts] == [1, 2]
