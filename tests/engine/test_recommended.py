"""Sampling parameters of generation_config.json."""

from __future__ import annotations

import json

import pytest

from cairn.engine.recommended import recommended_sampling
from cairn.errors import BadModel

ALL = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}


def folder_with(tmp_path, content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "generation_config.json").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({**ALL, "eos_token_id": [1], "do_sample": True, "max_new_tokens": 3}, ALL),
        ({"temperature": 1, "top_k": None}, {"temperature": 1}),
        ({"top_k": 50.0}, {"top_k": 50}),
        ({"temperature": 0}, {"temperature": 0}),
        ({}, {}),
        (b'\xef\xbb\xbf{"top_p": 0.5}', {"top_p": 0.5}),
    ],
)
def test_recommended(tmp_path, content, found):
    assert recommended_sampling(folder_with(tmp_path, content)) == found


def test_a_folder_without_the_file_recommends_nothing(tmp_path):
    assert recommended_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": True}, "min_p"),
        ([], "not a JSON object"),
        (b"{", "not JSON"),
    ],
)
def test_a_bad_value_names_its_file(tmp_path, content, words):
    with pytest.raises(BadModel, match=f"generation_config.json.*{words}"):
        recommended_sampling(folder_with(tmp_path, content))
