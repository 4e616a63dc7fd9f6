"""Chat completions with scripted outputs."""

import json

import pytest

from cairn.engine.tokenizer import Tokenizer
from tests.server.conftest import model_with_template
from tests.server.fake_api import FakeApi, chat_body
from tests.server.fake_client import LAYERS, WORDS

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "hear"}}


def call(name="look", arguments='{"at": 1}'):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def joined(events):
    """The result of a stream for a client, per choice."""
    choices = {}
    for event in events:
        for choice in event["choices"]:
            seen = choices.setdefault(
                choice["index"],
                {
                    "role": None,
                    "content": "",
                    "calls": {},
                    "logprobs": [],
                    "reads": [],
                    "end": None,
                },
            )
            delta = choice["delta"]
            seen["role"] = delta.get("role", seen["role"])
            seen["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                made = seen["calls"].setdefault(piece["index"], {"name": "", "arguments": ""})
                for key in made:
                    made[key] += piece["function"].get(key) or ""
            seen["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            seen["reads"] += choice.get("cairn", {"selection": []})["selection"]
            seen["end"] = choice["finish_reason"] or seen["end"]
    return choices


def whole(answer):
    """The same of a whole response."""
    return {
        choice["index"]: {
            "role": choice["message"]["role"],
            "content": choice["message"]["content"] or "",
            "calls": {
                i: {key: made["function"][key] for key in ("name", "arguments")}
                for i, made in enumerate(choice["message"].get("tool_calls", ()))
            },
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "reads": choice.get("cairn", {"selection": []})["selection"],
            "end": choice["finish_reason"],
        }
        for choice in answer["choices"]
    }


@pytest.mark.parametrize(
    "text, fields",
    [
        (WORDS.decode(), {}),
        (WORDS.decode(), {"n": 3, "logprobs": True, "top_logprobs": 2}),
        (WORDS.decode(), {"max_tokens": 9, "cairn": {"selection": True}}),
        (f"So: {call()} {call('hear', '{}')}", {"tools": [TOOL, OTHER], "logprobs": True}),
        (f"So: {call()} {call()}", {"tools": [TOOL], "parallel_tool_calls": False, "n": 2}),
        ("<tool_call>nothing", {"tools": [TOOL]}),
    ],
)
def test_stream_equals_answer(tool_api, text, fields):
    tool_api.reply_with(text)
    answer = tool_api.chat(**fields)
    usage = {"stream_options": {"include_usage": True}}
    *events, last = tool_api.events(PATH, chat_body(**fields, **usage))
    assert joined(events) == whole(answer)
    assert last["choices"] == [] and last["usage"] == answer["usage"]
    assert all(event["usage"] is None for event in events)
    assert len({event["id"] for event in events}) == 1


def test_role_comes_first_and_once(api):
    deltas = [event["choices"][0]["delta"] for event in api.events(PATH, chat_body())]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == WORDS.decode()


def test_no_usage_unless_asked(api):
    assert not any("usage" in event for event in api.events(PATH, chat_body()))


def test_tool_calls_without_markup(tool_api):
    tool_api.reply_with(f"I look. {call()}\n{call('hear', '{}')}")
    choice = tool_api.chat(tools=[TOOL, OTHER])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    made = choice["message"]["tool_calls"]
    assert [m["function"] for m in made] == [
        {"name": "look", "arguments": '{"at": 1}'},
        {"name": "hear", "arguments": "{}"},
    ]
    assert all(m["type"] == "function" for m in made)
    assert len({m["id"] for m in made}) == 2


def test_streamed_call_names_come_with_id_and_type(tool_api):
    tool_api.reply_with(call())
    events = tool_api.events(PATH, chat_body(tools=[TOOL]))
    pieces = [p for e in events for p in e["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["id"].startswith("call_") and pieces[0]["type"] == "function"
    assert pieces[0]["function"]["name"] == "look"
    assert all("id" not in piece for piece in pieces[1:])


def test_content_is_null_beside_calls_alone(tool_api):
    tool_api.reply_with(call())
    assert tool_api.chat(tools=[TOOL])["choices"][0]["message"]["content"] is None


def test_call_of_an_unknown_function_is_text(tool_api):
    tool_api.reply_with(call("jump"))
    message = tool_api.chat(tools=[TOOL])["choices"][0]["message"]
    assert message["content"] == call("jump") and "tool_calls" not in message


def test_strict_is_not_shown_to_the_model(tool_api):
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    tool_api.chat(tools=[strict], tool_choice="required")
    shown = tool_api.asked.prompt
    tool_api.chat(tools=[TOOL], tool_choice="required")
    assert tool_api.asked.prompt == shown


def test_call_cut_by_length_is_text(tool_api):
    tool_api.reply_with(call())
    choice = tool_api.chat(tools=[TOOL], max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == call()[:20]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}])
def test_a_call_that_was_asked_for_and_cut(tool_api, choice, fields):
    text = '<tool_call>\n{"name": "look", "arguments": {"at": 12}}\n</tool_call>'
    tool_api.reply_with(text)
    for size in range(1, len(text)):
        cut = tool_api.chat(tools=[TOOL], tool_choice=choice, max_tokens=size, **fields)
        (got,) = cut["choices"]
        assert got["finish_reason"] == "length"
        assert not got["message"]["content"]
        calls = got["message"].get("tool_calls", [])
        named = size >= text.index('"look"') + len('"look"')
        assert [made["function"]["name"] for made in calls] == ["look"] * named
        if named:
            written = text[:size].partition('"arguments": ')[2].partition("}")
            assert calls[0]["function"]["arguments"] == written[0] + written[1]


def test_a_second_call_that_was_cut(tool_api):
    text = f"{call()}\n{call(arguments='{}')}"
    tool_api.reply_with(text)
    body = chat_body(tools=[TOOL], tool_choice="required", max_tokens=len(text) - 13)
    streamed = joined(tool_api.events(PATH, body))[0]
    assert [made["arguments"] for made in streamed["calls"].values()] == ['{"at": 1}', "{}"]
    assert (streamed["content"], streamed["end"]) == ("", "length")
    choice = tool_api.answer(PATH, body)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 2 and choice["finish_reason"] == "length"


def test_one_call_ends_the_answer(tool_api):
    tool_api.reply_with(call() + call("look", '{"at": 2}') + "x" * 500)
    answer = tool_api.chat(tools=[TOOL], parallel_tool_calls=False)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["usage"]["completion_tokens"] == len(call())
    assert tool_api.client.aborted == [tool_api.asked.id]


def test_tool_choice_none_shows_no_tools(tool_api):
    tool_api.reply_with(call())
    message = tool_api.chat(tools=[TOOL], tool_choice="none")["choices"][0]["message"]
    assert message["content"] == call() and "tool_calls" not in message
    assert b"look" not in bytes(tool_api.asked.prompt)
    tool_api.chat(tools=[TOOL])
    assert b"look" in bytes(tool_api.asked.prompt)


@pytest.mark.parametrize(
    "choice, names",
    [
        ("required", ["look", "hear"]),
        ({"type": "function", "function": {"name": "hear"}}, ["hear"]),
        ("auto", []),
    ],
)
def test_tool_choice_becomes_a_grammar(tool_api, choice, names):
    tool_api.chat(tools=[TOOL, OTHER], tool_choice=choice)
    grammar = tool_api.asked.params.grammar
    assert tool_api.grammars.checked == ([grammar] if names else [])
    if names:
        assert [n for n in ("look", "hear") if f'\\"{n}\\"' in grammar.text] == names
    else:
        assert grammar is None


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "an answer"}}}


@pytest.mark.parametrize("form", [SCHEMA, {"type": "json_object"}])
@pytest.mark.parametrize("choice", [None, "auto"])
def test_tools_beside_a_response_format(tool_api, form, choice):
    given = {"tools": [TOOL, OTHER], "response_format": form, "tool_choice": choice}
    tool_api.reply_with(call())
    message = tool_api.chat(**given)["choices"][0]["message"]
    assert [made["function"]["name"] for made in message["tool_calls"]] == ["look"]
    tool_api.reply_with('{"x": 1}')
    assert tool_api.chat(**given)["choices"][0]["message"]["content"] == '{"x": 1}'
    text = tool_api.asked.params.grammar.text
    assert '\\"look\\"' in text and '\\"hear\\"' in text
    assert ("an answer" in text) == (form is SCHEMA)
    assert tool_api.grammars.checked[-1] == tool_api.asked.params.grammar


def test_a_strict_tool_beside_a_response_format(tool_api):
    schema = {"type": "object", "properties": {"at": {"const": "a place"}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    tool_api.chat(tools=[strict], response_format=SCHEMA)
    text = tool_api.asked.params.grammar.text
    assert "a place" in text and "an answer" in text


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look"}}, "none"]
)
def test_a_call_that_is_asked_for_has_no_response_format(tool_api, choice):
    tool_api.chat(tools=[TOOL], tool_choice=choice, response_format=SCHEMA)
    text = tool_api.asked.params.grammar.text
    assert ("look" in text, "an answer" in text) == (choice != "none", choice == "none")
    tool_api.chat(tools=[TOOL], response_format={"type": "text"})
    assert tool_api.asked.params.grammar is None


@pytest.mark.parametrize("bad", ["tools", "response_format"])
def test_which_of_both_is_wrong(tool_api, bad):
    schemas = {"tools": {}, "response_format": {}, bad: {"title": "bomb"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schemas["tools"]}}
    form = {"type": "json_schema", "json_schema": {"schema": schemas["response_format"]}}
    error = tool_api.error(PATH, chat_body(tools=[tool], response_format=form))
    assert error["param"] == {"tools": "tools[0].function.parameters"}.get(bad, bad)


def test_a_function_may_be_called_required(tool_api):
    odd = {"type": "function", "function": {"name": "required"}}
    choice = {"type": "function", "function": {"name": "required"}}
    tool_api.chat(tools=[TOOL, odd], tool_choice=choice)
    assert "look" not in tool_api.asked.params.grammar.text


def test_wrong_schema_of_a_tool(tool_api):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"title": "bomb"}}}
    error = tool_api.error(PATH, chat_body(tools=[TOOL, bad], tool_choice="required"))
    assert error["param"] == "tools[1].function.parameters"
    assert "tools[1], 'f'" in error["message"] and "the grammar" not in error["message"][:20]


def test_wrong_schema_of_a_tool_that_is_not_held_to_it(tool_api):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"title": "bomb"}}}
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    named = {"type": "function", "function": {"name": "look"}}
    for fields in ({"tools": [bad, TOOL]}, {"tools": [bad, strict]}, {"tool_choice": named}):
        tool_api.chat(**({"tools": [bad, TOOL]} | fields))


def test_a_strict_tool_holds_calls_to_its_schema(tool_api):
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    tool_api.reply_with(call())
    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}):
        answer = tool_api.chat(tools=[strict], **fields)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert tool_api.asked.params.grammar.kind == "ebnf"
        assert tool_api.grammars.checked[-1] == tool_api.asked.params.grammar
    tool_api.chat(tools=[strict], tool_choice="none")
    assert tool_api.asked.params.grammar is None
    tool_api.chat(tools=[TOOL])
    assert tool_api.asked.params.grammar is None


@pytest.mark.parametrize(
    "fields, param, text",
    [
        ({"tool_choice": "required"}, "tool_choice", "no"),
        ({"guided_json": {}, "regex": "a"}, "guided_json", "both"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "both",
        ),
        ({"bad_words": ["a"], "guided_regex": "a"}, "bad_words", "both"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "whole"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x'",
        ),
        ({"tools": [TOOL], "regex": "a"}, "regex", "tools"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "4"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": []}, "messages", "1"),
        ({"continue_final_message": True}, "messages", "assistant"),
        ({"chat_template_kwargs": {"unknown": 1}}, "chat_template_kwargs", "'unknown'"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "'tokenize'"),
        ({"cairn": {"selection": True}}, "cairn.selection", "max_tokens"),
        ({"cairn": {"selection": True}, "max_tokens": 4097}, "cairn.selection", "4096"),
    ],
)
def test_refused(tool_api, fields, param, text):
    error = tool_api.error(PATH, chat_body() | fields)
    assert error["param"] == param
    assert text in error["message"]
    assert not tool_api.client.submitted


def test_tools_without_a_template(api):
    api.reply_with(call())
    choice = api.chat(tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    made = choice["message"]["tool_calls"]
    answered = {"role": "tool", "tool_call_id": made[0]["id"], "content": "seen"}
    said = {"role": "assistant", "content": None, "tool_calls": made}
    messages = [*chat_body()["messages"], said, answered]
    api.answer(PATH, {"messages": messages, "tools": [TOOL]})
    text = bytes(api.asked.prompt).decode()
    assert json.dumps(TOOL) in text and "tool: seen\nassistant:" in text


def test_variables_without_a_template_are_refused(api):
    error = api.error(PATH, chat_body(chat_template_kwargs={"x": 1}))
    assert error["param"] == "chat_template_kwargs" and "template" in error["message"]


def test_logprobs_carry_exact_bytes(api):
    entries = api.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]) == WORDS
    assert [len(entry["top_logprobs"]) for entry in entries] == [3] * len(WORDS)
    assert [t["logprob"] for t in entries[0]["top_logprobs"]] == [-0.5, -1.0, -1.5]
    assert entries[0]["token"] == "E" and entries[0]["logprob"] == -0.5 * (ord("E") + 1)
    elephant = entries[6]
    assert elephant["token"] == "�" and elephant["bytes"] == [0xF0]


def test_logprobs_without_alternatives(api):
    entries = api.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert api.asked.params.logprobs == 0
    assert api.chat()["choices"][0]["logprobs"] is None


def test_selection_per_token(api):
    choice = api.chat(max_tokens=3, cairn={"selection": True})["choices"][0]
    read = choice["cairn"]["selection"]
    assert len(read) == 3
    assert [layer["layer"] for layer in read[0]] == list(LAYERS)
    assert read[2][0] == {"layer": 1, "pages": [2, 4], "weights": [0.5, 0.25], "window": 0.125}
    assert "cairn" not in api.chat(max_tokens=3)["choices"][0]


def test_selection_needs_layers_that_select(api):
    api.client.layers = ()
    error = api.error(PATH, chat_body(max_tokens=3, cairn={"selection": True}))
    assert "no layer of this model selects pages" in error["message"]
    assert error["param"] == "cairn.selection"


@pytest.mark.parametrize("reason", [0, 7, "stop!", None])
def test_stop_reason(api, reason):
    api.client.failure = {"finish_reason": "stop", "stop_reason": reason}
    assert api.chat()["choices"][0]["stop_reason"] == reason
    last = api.events(PATH, chat_body())[-1]["choices"][0]
    assert last["stop_reason"] == reason and last["finish_reason"] == "stop"


def test_usage(api):
    answer = api.chat("hi", n=2)
    prompt = len("user: hi\nassistant:")
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2 * len(WORDS),
        "total_tokens": prompt + 2 * len(WORDS),
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_too_long_names_both_numbers(api):
    error = api.error(PATH, chat_body("x" * 5000))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "5017" in error["message"] and "4095" in error["message"]


def test_without_tokenizer():
    api = FakeApi(None)
    assert "tokenizer" in api.error(PATH, chat_body())["message"]


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", {"a": 1}, [1], 3, None, ""])
def test_malformed_arguments_in_a_history(tool_api, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "failed"}
    user = {"role": "user", "content": "hi"}
    answer = tool_api.answer(PATH, {"messages": [user, said, answered], "tools": [TOOL]})
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "auto", "tools": []},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False, "tools": []},
        {"stream_options": {"include_usage": True}},
        {"verbosity": "low"},
        {"functions": []},
        {"function_call": "none"},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none"},
    ],
)
def test_fields_that_request_nothing_are_accepted(api, fields):
    api.chat(seed=1)
    plain = api.asked
    api.chat(seed=1, **fields)
    assert (api.asked.prompt, api.asked.params) == (plain.prompt, plain.params)


def test_reasoning_effort_reaches_a_template_that_knows_it(tmp_path):
    template = (
        "{{ reasoning_effort }} {{ enable_thinking }} "
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    api = FakeApi(Tokenizer(model_with_template(tmp_path / "model", template)))

    def shown(**fields):
        api.chat(**fields)
        return bytes(api.asked.prompt).decode()

    assert shown(reasoning_effort="high") == "high  hi"
    assert shown(reasoning_effort="none") == "none False hi"
    kwargs = {"enable_thinking": True, "reasoning_effort": "low"}
    assert shown(reasoning_effort="none", chat_template_kwargs=kwargs) == "low True hi"
