"""/tokenize, /detokenize and /tokenizer_info."""

import pytest

from tests.server.fake_api import FakeApi, chat_body


def test_text(api):
    answer = api.answer("/tokenize", {"prompt": "aö"})
    assert answer == {"count": 3, "max_model_len": 4096, "tokens": [97, 0xC3, 0xB6]}


def test_token_strs(api):
    answer = api.answer("/tokenize", {"prompt": "aö", "return_token_strs": True})
    assert answer["token_strs"] == ["a", "�", "�"]


def test_empty_text(api):
    assert api.answer("/tokenize", {"prompt": ""})["tokens"] == []


def test_messages_are_tokenized_as_a_chat_is(tool_api):
    tool = {"type": "function", "function": {"name": "look", "strict": False}}
    body = chat_body("hi", tools=[tool], chat_template_kwargs={"extra": "x"})
    tokens = tool_api.answer("/tokenize", body)["tokens"]
    tool_api.answer("/v1/chat/completions", body)
    assert tool_api.asked.prompt == tokens


def test_a_text_longer_than_the_model_is_counted(api):
    assert api.answer("/tokenize", {"prompt": "x" * 100_000})["count"] == 100_000


def test_tokenize_and_detokenize(api):
    text = "Grüße 🐘\n"
    tokens = api.answer("/tokenize", {"prompt": text})["tokens"]
    assert api.answer("/detokenize", {"tokens": tokens}) == {"prompt": text}


@pytest.mark.parametrize(
    "path, body, param, text",
    [
        ("/tokenize", {}, "prompt", "either"),
        ("/tokenize", {"prompt": "a"} | chat_body(), "prompt", "either"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "messages"),
        ("/tokenize", chat_body(add_special_tokens=True), "add_special_tokens", "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "str"),
        ("/detokenize", {"tokens": []}, "tokens", "1"),
        ("/detokenize", {"tokens": [256]}, "tokens", "255"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "0"),
    ],
)
def test_refused(api, path, body, param, text):
    error = api.error(path, body)
    assert error["param"] == param
    assert text in error["message"]


@pytest.mark.parametrize(
    "path, body", [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
def test_without_tokenizer(path, body):
    assert "tokenizer" in FakeApi(None).error(path, body)["message"]


def test_tokenizer_info(api, tool_api):
    info = api.request("GET", "/tokenizer_info").json()
    assert info["model_max_length"] == 4096 and info["chat_template"] is None
    assert {info[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token")} == {None}
    info = tool_api.request("GET", "/tokenizer_info").json()
    assert "<tool_call>" in info["chat_template"]
