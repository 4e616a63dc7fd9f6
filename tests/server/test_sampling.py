"""From a request's fields to sampling parameters, and the server's limits."""

import pytest

from cairn.errors import BadRequest
from cairn.server.options import ServerOptions
from cairn.server.protocol.common import SamplingFields, StreamOptions
from cairn.server.protocol.fields import read
from cairn.server.sampling import Output, requested_grammar, sampling_params, stream_options
from cairn.types import Grammar, SamplingParams

OPTIONS = ServerOptions(max_n=4, max_stop=2, max_logprobs=5, max_selection_tokens=10)


SCHEMA = '{"response_format": {"type": "json_schema", "json_schema": {"schema": {"b":1,"a":2}}}}'


def fields(text="{}"):
    return read(text.encode(), SamplingFields)


def params(text="{}", **output):
    return sampling_params(fields(text), Output(**{"max_tokens": 7} | output), OPTIONS)


def test_defaults_are_those_of_the_engine():
    assert params() == SamplingParams(max_tokens=7)
    assert params('{"temperature": null, "n": null, "stop": null}') == SamplingParams(max_tokens=7)


def test_missing_fields_are_the_models_recommendation():
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    output = Output(max_tokens=7)
    got = sampling_params(fields(), output, OPTIONS, defaults)
    assert got == SamplingParams(max_tokens=7, **defaults)
    text = '{"temperature": 0, "top_k": null, "repetition_penalty": 1}'
    got = sampling_params(fields(text), output, OPTIONS, defaults)
    assert got == SamplingParams(max_tokens=7, temperature=0, top_k=20)


def test_fields_arrive():
    got = params('{"temperature": 0, "seed": -3, "stop": ["a", "b"], "logit_bias": {"5": -2}}')
    assert got.temperature == 0 and got.seed == -3
    assert got.stop == ("a", "b") and got.logit_bias == {5: -2}
    assert params('{"stop": "a"}').stop == ("a",)


@pytest.mark.parametrize(
    "text, output, param, limit",
    [
        ('{"n": 5}', {}, "n", "4"),
        ('{"stop": ["a", "b", "c"]}', {}, "stop", "2"),
        ("{}", {"logprobs": 6}, "logprobs", "5"),
        ('{"cairn": {"selection": true}}', {"max_tokens": 11}, "cairn.selection", "10"),
        ('{"cairn": {"selection": true}}', {"max_tokens": None}, "cairn.selection", "10"),
        ('{"min_tokens": 8}', {}, "min_tokens", "7"),
    ],
)
def test_limits_of_sampling_fields(text, output, param, limit):
    with pytest.raises(BadRequest, match=limit) as caught:
        params(text, **output)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "text, field, grammar",
    [
        ("{}", None, None),
        ('{"response_format": {"type": "text"}}', None, None),
        (
            '{"response_format": {"type": "json_object"}}',
            "response_format",
            Grammar("json_schema", '{"type": "object"}'),
        ),
        (
            SCHEMA,
            "response_format",
            Grammar("json_schema", '{"b":1,"a":2}'),
        ),
        ('{"regex": "a+"}', "regex", Grammar("regex", "a+")),
        ('{"ebnf": "start: /a/"}', "ebnf", Grammar("ebnf", "start: /a/")),
    ],
)
def test_grammars(text, field, grammar):
    expected = None if field is None else (field, grammar)
    assert requested_grammar(fields(text)) == expected


def test_two_grammars_are_refused():
    with pytest.raises(BadRequest, match="response_format and regex"):
        requested_grammar(fields('{"regex": "a", "response_format": {"type": "json_object"}}'))
    text = '{"regex": "a", "response_format": {"type": "text"}}'
    assert requested_grammar(fields(text)) == ("regex", Grammar("regex", "a"))


def test_stream_options():
    assert stream_options(fields()) is None
    assert stream_options(fields('{"stream": false}')) is None
    assert stream_options(fields('{"stream": true}')) == StreamOptions()
    both = '{"stream": true, "stream_options": {"include_usage": true}}'
    assert stream_options(fields(both)).include_usage
    assert stream_options(fields('{"stream_options": {"include_usage": true}}')) is None
