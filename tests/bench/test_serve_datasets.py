"""Prompts: their lengths with each way of counting, shared prefixes, conversation files."""

import json
import random

import pytest

from cairn.bench.serve.client import Server, ServerAddress
from cairn.bench.serve.datasets import DatasetOptions, open_dataset
from cairn.bench.serve.lengths import open_lengths, random_text
from cairn.bench.serve.load import run
from cairn.config import default_model_path
from cairn.errors import BadConfig
from tests.bench.fake_api import FakeApi, tokens_of


def items(api, options, count, tokenizer=None):
    async def main():
        async with Server(ServerAddress(api.url)) as server:
            lengths = await open_lengths(server, tokenizer)
            dataset = await open_dataset(options, lengths, count)
            return [await dataset.item(i) for i in range(count)], lengths

    return run(main())


@pytest.mark.parametrize("chars", [1, 2, 7, 100])
def test_random_text_has_the_length_asked_for(chars):
    assert len(random_text(random.Random(1), chars)) == chars


def test_prompts_fit_exactly_where_the_server_counts():
    with FakeApi() as api:
        found, lengths = items(api, DatasetOptions(input_len=301, output_len=7), 5)
    assert lengths.source == "/tokenize" and lengths.exact
    assert [tokens_of(x.prompt) for x in found] == [301] * 5
    assert [(x.input_len, x.output_len) for x in found] == [(301, 7)] * 5
    assert len({x.prompt for x in found}) == 5


def test_a_vocabulary_that_no_proportion_fits():
    """Words of odd lengths: the correction uses the counted tokens, not an estimate."""
    with FakeApi() as api:

        async def main():
            async with Server(ServerAddress(api.url)) as server:
                lengths = await open_lengths(server, None)

                async def words(text):
                    return len(text.split())

                skewed = type(lengths)(words, 0.3, "words", True)
                return await skewed.text(random.Random(1), 200)

        text, known = run(main())
    assert known == len(text.split()) == 200


def test_a_tokenizer_folder_counts_instead_of_the_server():
    with FakeApi() as api:
        options = DatasetOptions(input_len=50)
        found, lengths = items(api, options, 2, default_model_path())
        assert api.tokenized == 0
    assert lengths.source == "tokenizer"
    # A token of the embedded model is a byte.
    assert [len(x.prompt) for x in found] == [50, 50]


def test_without_either_one_request_tells_the_proportion():
    with FakeApi(tokenize=False) as api:
        found, lengths = items(api, DatasetOptions(input_len=500), 3)
        assert len(api.bodies) == 1 and api.bodies[0]["max_tokens"] == 1
    assert lengths.source == "usage" and not lengths.exact
    assert [tokens_of(x.prompt) for x in found] == pytest.approx([500] * 3, rel=0.01)


def test_without_tokenize_and_usage_a_tokenizer_is_required():
    with FakeApi(tokenize=False, usage=False) as api, pytest.raises(BadConfig, match="--tokenizer"):
        items(api, DatasetOptions(), 1)


def test_lengths_spread_around_the_middle():
    with FakeApi() as api:
        options = DatasetOptions(input_len=100, output_len=50, range_ratio=0.5)
        found, _ = items(api, options, 60)
    inputs, outputs = {x.input_len for x in found}, {x.output_len for x in found}
    assert 50 <= min(inputs) < 70 and 130 < max(inputs) <= 150
    assert 25 <= min(outputs) < 35 and 65 < max(outputs) <= 75


def test_the_seed_decides():
    with FakeApi() as api:
        one, _ = items(api, DatasetOptions(input_len=20, seed=1), 3)
        again, _ = items(api, DatasetOptions(input_len=20, seed=1), 3)
        other, _ = items(api, DatasetOptions(input_len=20, seed=2), 3)
    assert one == again
    assert not {x.prompt for x in one} & {x.prompt for x in other}


def test_prefixes_are_shared_by_groups():
    with FakeApi() as api:
        options = DatasetOptions("shared-prefix", input_len=10, prefix_len=100, prefix_groups=3)
        found, _ = items(api, options, 30)
    heads = {x.prompt[:380] for x in found}
    assert len(heads) == 3
    assert len({x.prompt for x in found}) == 30
    assert {x.input_len for x in found} == {110}


TALK = {
    "conversations": [
        {"from": "human", "value": "What is a cairn, and who built it?"},
        {"from": "gpt", "value": "A pile of stones that marks the way."},
        {"from": "human", "value": "Thanks."},
    ]
}
SYSTEM_FIRST = {
    "conversations": [
        {"from": "system", "value": "Be short, be right, be kind."},
        {"from": "gpt", "value": "Yes, yes, yes and yes again."},
    ]
}
TOO_SHORT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi"}]}


@pytest.mark.parametrize("lines", [False, True])
def test_conversations_from_a_file(tmp_path, lines):
    path = tmp_path / "talks.json"
    entries = [SYSTEM_FIRST, TALK, TOO_SHORT, {"other": 1}, {"conversations": []}]
    text = "\n".join(map(json.dumps, entries)) if lines else json.dumps(entries)
    path.write_text(text, encoding="utf-8")
    with FakeApi() as api:
        found, _ = items(api, DatasetOptions("sharegpt", path), 2)
    # Only one conversation is usable, so the second prompt repeats the first.
    assert [x.prompt for x in found] == ["What is a cairn, and who built it?"] * 2
    assert (found[0].input_len, found[0].output_len) == (9, 9)


@pytest.mark.parametrize("text, message", [("[1, 2]", "usable"), ("[{", "JSON"), ("{x}", "JSON")])
def test_a_file_without_conversations(tmp_path, text, message):
    path = tmp_path / "talks.json"
    path.write_text(text, encoding="utf-8")
    with FakeApi() as api, pytest.raises(BadConfig, match=message):
        items(api, DatasetOptions("sharegpt", path), 2)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "other"},
        {"name": "sharegpt"},
        {"name": "random", "path": default_model_path()},
        {"range_ratio": 1.0},
        {"range_ratio": -0.1},
        {"input_len": 0},
        {"prefix_groups": 0},
    ],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(BadConfig):
        DatasetOptions(**options)
