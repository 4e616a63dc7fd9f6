"""Anthropic's Messages API with scripted outputs."""

import json

import pytest

from cairn.server.auth import check_key
from cairn.server.messages import _ending
from cairn.server.options import ServerOptions
from cairn.server.protocol.chat import ChatChunkChoice, ChatDelta
from tests.server.fake_api import FakeApi

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "data": "aGk="}}


def body(*messages, **fields):
    return {"messages": list(messages) or [USER], "max_tokens": 200, **fields}


def prompt_of(api, given, path=PATH):
    api.answer(path, given)
    return bytes(api.asked.prompt).decode()


def events(api, given):
    """(event, data) of a stream."""
    response = api.post(PATH, given | {"stream": True})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(data["type"] == name for name, data in found)
    return found


def test_a_message(tool_api):
    tool_api.reply_with("Hello you")
    answer = tool_api.answer(PATH, body(system="Be brief.", temperature=0, top_k=3))
    assert answer["type"] == "message" and answer["role"] == "assistant"
    assert answer["id"].startswith("msg-") and answer["model"] == "tiny"
    assert answer["content"] == [{"type": "text", "text": "Hello you"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    asked = tool_api.asked
    length = len(asked.prompt)
    assert answer["usage"]["input_tokens"] == length - length // 2
    assert answer["usage"]["cache_read_input_tokens"] == length // 2
    assert answer["usage"]["output_tokens"] == 9
    assert (asked.params.temperature, asked.params.top_k, asked.params.max_tokens) == (0, 3, 200)
    text = bytes(asked.prompt).decode()
    assert text.startswith("<|system|>Be brief.\n<|user|>hi\n")


def test_the_limit_is_a_reason(tool_api):
    tool_api.reply_with("Hello you")
    assert tool_api.answer(PATH, body(max_tokens=3))["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("fields", [{}, {"tool_choice": {"type": "any"}}])
def test_a_call_and_its_result(tool_api, fields):
    tool_api.reply_with(CALL)
    answer = tool_api.answer(PATH, body(tools=[TOOL], **fields))
    (block,) = answer["content"]
    assert block["type"] == "tool_use" and block["name"] == "look" and block["input"] == {"at": 1}
    assert answer["stop_reason"] == "tool_use"
    assert (tool_api.asked.params.grammar is not None) == bool(fields)
    tool_api.reply_with("done")
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
    last = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    told = {"role": "assistant", "content": answer["content"]}
    text = prompt_of(tool_api, body(USER, told, last, tools=[TOOL]))
    called = '{"name": "look", "arguments": {"at": 1}}'
    assert f"<tool_call>{block['id']}{called}</tool_call>" in text
    assert f"<|tool|>seen{block['id']}\n<|user|>So?\n" in text


def test_tool_choices(tool_api):
    tool_api.reply_with(CALL + CALL)
    named = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    answer = tool_api.answer(PATH, body(tools=[TOOL], tool_choice=named))
    assert len(answer["content"]) == 1
    answer = tool_api.answer(PATH, body(tools=[TOOL], tool_choice={"type": "none"}))
    assert answer["content"] == [{"type": "text", "text": CALL + CALL}]


def test_a_stream(tool_api):
    tool_api.reply_with(f"Well. {CALL}")
    found = events(tool_api, body(tools=[TOOL]))
    names = [name for name, _ in found]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    start = found[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    begun = [data["content_block"] for name, data in found if name == "content_block_start"]
    assert [block["type"] for block in begun] == ["text", "tool_use"]
    assert begun[1]["name"] == "look" and begun[1]["input"] == {}
    text, given = "", ""
    for name, data in found:
        if name == "content_block_delta":
            text += data["delta"].get("text", "")
            given += data["delta"].get("partial_json", "")
            assert data["index"] == (0 if "text" in data["delta"] else 1)
    assert text.strip() == "Well." and json.loads(given) == {"at": 1}
    assert names.count("content_block_stop") == 2
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2][1]["usage"]["output_tokens"] == len(f"Well. {CALL}")


def test_a_failure_in_a_stream_is_an_event(tool_api):
    tool_api.client.failure = {"finish_reason": "error", "error": "no numbers"}
    found = events(tool_api, body())
    assert found[-1][0] == "error" and found[-1][1]["error"]["message"] == "no numbers"


def test_an_error_before_it_is_an_answer(tool_api):
    error = tool_api.error(PATH, body({"role": "user", "content": "x" * 5000}, stream=True))
    assert error["code"] == "context_length_exceeded"


def test_the_assistants_last_words_are_continued(tool_api):
    text = prompt_of(tool_api, body(USER, {"role": "assistant", "content": "Well"}))
    assert text.endswith("<|assistant|>Well")


def test_fields_without_effect_are_accepted(tool_api):
    plain = prompt_of(tool_api, body())
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "hi", **cached}]
    given = body(
        {"role": "user", "content": blocks},
        metadata={"user_id": "x"},
        thinking={"type": "enabled", "budget_tokens": 1000},
        service_tier="auto",
    )
    assert prompt_of(tool_api, given) == plain
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    # Programs that store a history add fields of their own.
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes.", "id": "b"}]}
    said["timestamp"] = 1
    text = prompt_of(tool_api, body(USER, said, USER))
    assert "<|assistant|>hmYes.\n" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messages": [USER]}, "max_tokens is missing"),
        (body(model="gpt"), "'gpt' is not served"),
        (body({"role": "user", "content": [IMAGE]}), "text only"),
        (body(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "runs no tools"),
        (body(tools=[TOOL], tool_choice={"type": "tool"}), "tool_choice.name is missing"),
        (body(tools=[TOOL], tool_choice={"type": "tool", "name": "x"}), "'x'"),
        (body(unknown=1), "unknown is not a field"),
        (body(tools=[{"name": "a b"}]), "tools[0].name is"),
        (
            body({"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "look"}]}),
            "none of 'text', 'image', 'tool_result'",
        ),
    ],
)
def test_refused(tool_api, given, words):
    response = tool_api.post(PATH, given)
    assert response.status_code in (400, 404)
    assert words in response.json()["error"]["message"]


def test_an_answer_in_a_form(tool_api):
    schema = {"type": "json_schema", "schema": SCHEMA}
    tool_api.answer(PATH, body(output_config={"effort": "low", "format": schema}))
    assert json.loads(tool_api.asked.params.grammar.text) == SCHEMA
    assert "low<|assistant|>" in bytes(tool_api.asked.prompt).decode()


def test_tokens_are_counted(tool_api):
    given = {"messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    length = len(prompt_of(tool_api, given | {"max_tokens": 1}).encode())
    assert tool_api.answer(f"{PATH}/count_tokens", given) == {"input_tokens": length}


def test_the_key_of_anthropics_clients(tokenizer):
    api = FakeApi(tokenizer, api_keys=("secret",))
    for key, status in (("secret", 200), ("wrong", 401)):
        answer = api.request("POST", PATH, json=body(), headers={"X-Api-Key": key})
        assert answer.status_code == status
    assert check_key("/health", {}, ("secret",)) is None


def test_a_stop_sequence_is_told():
    part = ChatChunkChoice(0, ChatDelta(), finish_reason="stop", stop_reason="END")
    assert _ending(part) == ("stop_sequence", "END")
    part = ChatChunkChoice(0, ChatDelta(), finish_reason="stop", stop_reason=7)
    assert _ending(part) == ("end_turn", None)


def test_thoughts_are_a_block_of_their_own(tool_api):
    tool_api.state.options = ServerOptions(reasoning_parser="think")
    tool_api.reply_with(f"<think>Hm.</think>Yes. {CALL}")
    answer = tool_api.answer(PATH, body(tools=[TOOL]))
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    found = events(tool_api, body(tools=[TOOL]))
    deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
    begun = [d["content_block"]["type"] for name, d in found if name == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    back = {"role": "assistant", "content": answer["content"][:2]}
    assert "<|assistant|>Hm.Yes." in prompt_of(tool_api, body(USER, back, USER))


def test_thinking_may_be_disabled(tool_api):
    off = prompt_of(tool_api, body(thinking={"type": "disabled"}))
    assert off == prompt_of(tool_api, body()).replace("<|assistant|>", "none<|assistant|>")


def test_arguments_that_are_no_json_do_not_vanish(tool_api):
    tool_api.reply_with('<tool_call>{"name": "look", "arguments": {"at": one}}</tool_call>')
    (use,) = tool_api.answer(PATH, body(tools=[TOOL]))["content"]
    assert use["input"] == {"arguments": '{"at": one}'}


def test_errors_name_the_fields_of_this_api(tool_api):
    bomb = {"type": "object", "properties": {"a": {"type": "bomb"}}}
    image = {"type": "image", "source": {"type": "url", "url": "data:x"}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": "1"}
    tool = {"name": "look", "input_schema": bomb}
    form = {"type": "json_schema", "schema": bomb}
    for fields, param in (
        ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
        ({"output_config": {"format": form}}, "output_config.format"),
        ({"tools": [tool], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        (
            {"system": "s", "messages": [{"role": "user", "content": [image]}]},
            "messages[0].content[0]",
        ),
        # Results of tools are messages of a chat, so that parts are counted anew there.
        ({"messages": [{"role": "user", "content": [result, image]}]}, "messages[0]"),
    ):
        body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        assert tool_api.error("/v1/messages", {**body, **fields})["param"] == param
