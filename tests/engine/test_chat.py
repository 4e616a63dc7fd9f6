"""Normalization of messages for templates, and invalid messages."""

from __future__ import annotations

import pytest

from cairn.engine.chat import checked_messages, plain_text, with_wrapped_arguments
from cairn.errors import BadRequest

CALL = {"id": "c1", "function": {"name": "look", "arguments": ""}}


def test_messages_become_plain_and_the_callers_stay():
    given = [
        {"role": "user", "content": [], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None},
    ]
    assert checked_messages(given) == [
        {"role": "user", "content": "", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {}}}
            ],
        },
    ]
    assert given[1]["content"] is None and given[1]["tool_calls"] == [CALL]


def call(**function: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "tool_calls": [{"function": function}]}]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], r"messages\[0\] needs a string 'role'"),
        ([{"role": "", "content": "x"}], "needs a string 'role'"),
        ([{"role": "user"}], r"messages\[0\] needs a string 'content'"),
        ([{"role": "user", "content": None, "tool_calls": None}], "needs a string 'content'"),
        ([{"role": "user", "content": b"x"}], "needs a string 'content'"),
        ([{"role": "user", "content": {"type": "text"}}], "needs a string 'content'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\] is of type 'image_url', but only text",
        ),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'x', but only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a string 'text', not None"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "x"}],
            r"messages\[1\].tool_calls must be a list",
        ),
        (call(arguments="{}"), r"tool_calls\[0\] needs a 'function' with a string 'name'"),
    ],
)
def test_invalid_messages_are_refused(messages, words):
    with pytest.raises(BadRequest, match=words):
        checked_messages(messages)


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"content": None, "tool_calls": []}, {"content": ""}),
        ({"content": "x", "tool_calls": []}, {"content": "x"}),
        ({"reasoning_content": "Hm."}, {"content": "", "reasoning_content": "Hm."}),
        ({"content": "x", "reasoning_content": None}, {"content": "x"}),
        ({"content": "x", "reasoning": "Hm."}, {"content": "x", "reasoning_content": "Hm."}),
        (
            {"content": "x", "reasoning": "no", "reasoning_content": "Hm."},
            {"content": "x", "reasoning_content": "Hm."},
        ),
    ],
)
def test_other_fields_of_messages_are_normalised(message, seen):
    assert checked_messages([{"role": "assistant", **message}]) == [{"role": "assistant", **seen}]


def test_a_tool_may_answer_nothing():
    for message in ({"role": "tool", "content": None}, {"role": "tool"}):
        assert checked_messages([message]) == [{"role": "tool", "content": ""}]


@pytest.mark.parametrize("given", [{}, {"id": None}, {"type": "function"}, {"type": None}])
def test_a_call_has_a_type_and_no_empty_id(given):
    message = {"role": "assistant", "tool_calls": [{**given, "function": {"name": "f"}}]}
    (call,) = checked_messages([message])[0]["tool_calls"]
    assert call == {"type": "function", "function": {"name": "f", "arguments": {}}}


def test_arguments_may_be_a_mapping():
    (message,) = checked_messages(call(name="f", arguments={"a": [1]}))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": [1]}


@pytest.mark.parametrize(
    "text",
    [
        *("{a", "[1]", '{"a": ', "3", "null", '"x"', "{} x"),
        *("[" * 100_000, "1" * 5000, '{"a": "\\ud83d"}'),
    ],
)
def test_arguments_that_are_no_object_stay_text(text):
    (message,) = checked_messages(call(name="f", arguments=text))
    assert message["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("given", "text"), [([1, "é"], '[1, "é"]'), (3, "3"), (2.5, "2.5"), (True, "true")]
)
def test_arguments_that_are_another_value_are_its_json(given, text):
    (message,) = checked_messages(call(name="f", arguments=given))
    assert message["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("given", [None, "", " \n", "{}", {}])
def test_no_arguments(given):
    (message,) = checked_messages(call(name="f", arguments=given))
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_wrapped_arguments():
    good = {"role": "user", "content": "x"}
    assert with_wrapped_arguments(checked_messages([good, *call(name="f", arguments="{}")])) is None
    messages = checked_messages([good, *call(name="f", arguments="{a")])
    wrapped = with_wrapped_arguments(messages)
    assert wrapped is not None and wrapped[0] == good
    assert wrapped[1]["tool_calls"][0]["function"]["arguments"] == {"arguments": "{a"}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == "{a"


def test_plain_text():
    messages = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]
    assert plain_text(messages, answer=True) == "user: a\nb\nassistant: c\nassistant:"
    assert plain_text(messages, answer=False) == "user: a\nb\nassistant: c"
