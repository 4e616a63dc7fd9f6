import pytest

from cairn.engine.admission import CoreShape, check, stop_ids
from cairn.engine.messages import pack_ids, unpack_ids
from cairn.errors import BadRequest, TooLong
from cairn.types import Grammar, SamplingParams

SHAPE = CoreShape(vocab_size=100, max_model_len=10, eos_ids=(2, 100), seed=0, selects=True)
DENSE = CoreShape(vocab_size=100, max_model_len=10, eos_ids=(), seed=0)


def unpacked(prompt):
    """A request as it arrives from the API's process."""
    return unpack_ids(pack_ids(prompt))


@pytest.mark.parametrize("form", [list, unpacked])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(stop=("x",), logprobs=100, prompt_logprobs=-1, selection=True),
        SamplingParams(stop_token_ids=(99,), logit_bias={99: 1.0}, min_tokens=3),
        SamplingParams(grammar=Grammar("regex", "a+")),
    ],
)
def test_passes_what_can_be_served(params, form):
    check(form([0, 99, 5]), params, SHAPE, has_tokenizer=True)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([3, 100], {}, "prompt token id 100 is out of range. Ids go from 0 to 99"),
        ([3, -1], {}, "prompt token id -1 is out of range"),
        ([3], {"stop_token_ids": (100,)}, "stop_token_ids has token id 100"),
        ([3], {"logit_bias": {100: 1.0}}, "logit_bias has token id 100"),
        ([3], {"logprobs": 101}, "logprobs is 101, but the vocabulary has 100 tokens"),
        ([3], {"prompt_logprobs": 101}, "prompt_logprobs is 101"),
        ([3], {"stop": ("x",)}, r"stop is \('x',\), but this model has no tokenizer"),
        ([3], {"grammar": Grammar("regex", "a")}, "regex grammar .* no tokenizer"),
        ([3], {"selection": True}, "no layer of this model selects pages"),
        ([3], {"stop_token_ids": tuple(range(100)), "min_tokens": 1}, "every token id ends"),
    ],
)
@pytest.mark.parametrize("form", [list, unpacked])
def test_refuses_what_never_can(prompt, params, message, form):
    with pytest.raises(BadRequest, match=message):
        check(form(prompt), SamplingParams(**params), DENSE, has_tokenizer=False)


def test_a_prompt_that_can_never_fit_names_both_numbers():
    check([0] * 9, SamplingParams(), SHAPE, has_tokenizer=True)
    with pytest.raises(TooLong, match="prompt has 10 tokens.* may have 10 "):
        check([0] * 10, SamplingParams(), SHAPE, has_tokenizer=True)


def test_a_prompt_that_is_only_scored_may_fill_the_context():
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    check([0] * 10, params, SHAPE, has_tokenizer=True)
    with pytest.raises(TooLong, match="prompt has 11 tokens, but it may have 10 "):
        check([0] * 11, params, SHAPE, has_tokenizer=True)


def test_stop_ids_are_the_ids_that_can_come_once_each():
    assert stop_ids(SamplingParams(stop_token_ids=(7, 2, 7)), SHAPE) == (2, 7)
    assert stop_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), SHAPE) == (7,)
