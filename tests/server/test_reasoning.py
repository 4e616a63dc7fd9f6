"""Reasoning is separated from the answer and counted, in whole responses and in streams."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cairn.engine.grammar import GrammarCompiler, Vocabulary, unpack
from cairn.engine.tokenizer import Tokenizer
from cairn.server.reasoning import ReasoningParser, grammar_after_reasoning
from cairn.server.reasoning_markers import THINK, choose_markers
from cairn.types import Grammar
from tests.server.conftest import model_with_template
from tests.server.fake_api import FakeApi, chat_body
from tests.server.test_chat import PATH, TOOL, call

END = 257
OPEN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<tool_call></think>"
TEMPLATES = {"closed": OPEN, "open": OPEN + "<think>\n"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking")
    return {
        name: Tokenizer(model_with_template(folder / name, template))
        for name, template in TEMPLATES.items()
    }


@pytest.fixture
def thinks(tokenizers):
    """An API whose chat template opens the reasoning."""
    return FakeApi(tokenizers["open"])


def split(text, opened):
    reader = ReasoningParser(THINK, opened)
    parts = [reader.feed(piece) for piece in text] + [reader.close()]
    return tuple("".join(each) for each in zip(*parts, strict=True))


@pytest.mark.parametrize(
    "text, opened, expected",
    [
        ("<think>\nHm.\n\nSo\n</think>\n\nYes.\n", False, ("Hm.\n\nSo", "Yes.\n")),
        ("\nHm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
        (" \n<think></think>Yes", False, ("", "Yes")),
        ("\n Yes <think>no</think>", False, ("", "\n Yes <think>no</think>")),
        ("Hm. < / </thin", True, ("Hm. < / </thin", "")),
        ("<thi", False, ("", "<thi")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("\n\n", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_result_does_not_depend_on_how_the_text_is_split(text, opened, expected):
    assert split([text], opened) == expected
    assert split(list(text), opened) == expected
    for i in range(len(text)):
        assert split([text[:i], text[i:]], opened) == expected


def test_markers_are_detected_in_the_chat_template():
    assert choose_markers("auto", "{{ '</think>' }}") == THINK
    assert choose_markers("auto", "a [THINK] b [/THINK]").begin == "[THINK]"
    for name, template in (("auto", "{{ x }}"), ("auto", None), ("none", "</think>")):
        assert choose_markers(name, template) is None
    for name in ("think", "qwen3", "deepseek_r1", "deepseek-r1"):
        assert choose_markers(name, None) == THINK


def test_reasoning_and_tool_calls(tokenizers):
    for name, text in (("closed", "<think>Hm.</think>\n\nSo: "), ("open", "Hm.\n</think>So: ")):
        api = FakeApi(tokenizers[name])
        api.reply_with(text + call())
        message = api.chat(tools=[TOOL])["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm." and message["content"] == "So:"
        assert message["tool_calls"][0]["function"]["arguments"] == '{"at": 1}'
        deltas = [
            choice["delta"]
            for event in api.events(PATH, chat_body(tools=[TOOL]))
            for choice in event["choices"]
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
        assert any("tool_calls" in delta for delta in deltas)


def test_reasoning_tokens_are_counted(tokenizers):
    """A token is a byte. The markers count, an answer without reasoning counts 0."""
    thinking, closed = FakeApi(tokenizers["open"]), FakeApi(tokenizers["closed"])
    cases = [
        (thinking, "Hm.</think>Yes.", len("Hm.</think>")),
        (thinking, "Hm", len("Hm")),
        (closed, "<think>Hm.</think>Yes.", len("<think>Hm.</think>")),
        (closed, "Yes.", 0),
        (closed, "<thin", 0),
    ]
    for api, text, count in cases:
        api.reply_with(text)
        usage = api.chat(n=2)["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * count}, text
        hidden = api.chat(include_reasoning=False)["usage"]
        assert hidden["completion_tokens_details"] == {"reasoning_tokens": count}, text
        body = chat_body(stream_options={"include_usage": True})
        assert api.events(PATH, body)[-1]["usage"]["completion_tokens_details"] == {
            "reasoning_tokens": count
        }
        response = api.answer("/v1/responses", {"input": "hi"})
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": count}


def test_reasoning_switches(thinks):
    thinks.reply_with("Hm.</think>Yes.")
    message = thinks.chat(separate_reasoning=False)["choices"][0]["message"]
    assert message["content"] == "Hm.</think>Yes." and "reasoning_content" not in message
    message = thinks.chat(include_reasoning=False)["choices"][0]["message"]
    assert message["content"] == "Yes." and "reasoning_content" not in message
    off = FakeApi(thinks.state.tokenizer, reasoning_parser="none")
    off.reply_with("Hm.</think>Yes.")
    assert off.chat()["choices"][0]["message"]["content"] == "Hm.</think>Yes."


def test_a_tool_call_inside_reasoning_is_text(thinks):
    thinks.reply_with(f"{call()}</think>No.")
    message = thinks.chat(tools=[TOOL])["choices"][0]["message"]
    assert message["reasoning_content"] == call() and "tool_calls" not in message


def test_no_reasoning_content_without_markers_in_the_template(api):
    api.reply_with("<think>Hm.</think>")
    message = api.chat()["choices"][0]["message"]
    assert message["content"] == "<think>Hm.</think>" and "reasoning_content" not in message


@pytest.fixture(scope="module")
def compiler():
    tokens = (*(bytes([i]) for i in range(256)), b"</think>", b"<end>")
    return GrammarCompiler(Vocabulary(tokens, (256, END)))


def takes(compiler, grammar, tokens):
    """Whether an output of these tokens is complete."""
    state = compiler.compile(grammar, [END])
    for token in tokens:
        state.accept(token)
    return state.error is None and END in np.flatnonzero(unpack(state.mask()))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"const": 7}'),
        Grammar("regex", "7"),
        Grammar("ebnf", 'start: "7"'),
        Grammar("ebnf", 'start: a\na: %json {"const": 7, "title": "start"}'),
    ],
)
def test_grammar_applies_after_reasoning(compiler, grammar):
    delayed = grammar_after_reasoning(grammar, THINK, {})
    assert takes(compiler, delayed, b"Hm, 8?\n</think>\n\n7")
    for text in (b"7", b"Hm.</think>8", b"Hm.</think>7</think>"):
        assert not takes(compiler, delayed, text)
    special = grammar_after_reasoning(grammar, THINK, {"</think>": 256})
    assert takes(compiler, special, (*b"Hm", 256, *b"\n7"))
    assert not takes(compiler, special, b"Hm</think>7")


def test_grammar_whose_start_rule_cannot_be_renamed():
    assert grammar_after_reasoning(Grammar("ebnf", 'root ::= "7"'), THINK, {}) is None


def test_response_format_applies_after_reasoning(thinks):
    thinks.reply_with('Hm.</think>{"a": 1}')
    form = {"type": "json_object"}
    message = thinks.chat(response_format=form)["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1} and message["reasoning_content"] == "Hm."
    assert "</think>" in thinks.asked.params.grammar.text
    thinks.reply_with("7")
    message = thinks.chat(ebnf='root ::= "7"')["choices"][0]["message"]
    assert message["content"] == "7" and "reasoning_content" not in message


def test_markers_that_are_special_tokens_are_kept_in_the_text(thinks):
    thinks.chat()
    assert thinks.asked.params.skip_special_tokens
    thinks.state.tokenizer.special_names["</think>"] = 300
    try:
        thinks.chat()
        assert not thinks.asked.params.skip_special_tokens
    finally:
        del thinks.state.tokenizer.special_names["</think>"]
