"""OpenAI's Responses API with scripted outputs, called by OpenAI's client."""

import asyncio

import httpx
import openai
import pytest

from cairn.server.options import ServerOptions

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
PATH = "/v1/responses"
IMAGE = {"type": "input_image", "image_url": "x"}


def client_of(api):
    transport = httpx.ASGITransport(api.app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="x", http_client=http, max_retries=0
    )


def create(api, given="hi", **fields):
    async def run():
        return await client_of(api).responses.create(model="tiny", input=given, **fields)

    return asyncio.run(run())


def streamed(api, given="hi", **fields):
    async def run():
        async with client_of(api).responses.stream(model="tiny", input=given, **fields) as stream:
            events = [event async for event in stream]
            whole = events[-1].type == "response.completed"
            return events, await stream.get_final_response() if whole else None

    return asyncio.run(run())


def prompt(api):
    return bytes(api.asked.prompt).decode()


def test_a_text(tool_api):
    tool_api.reply_with("Hello you")
    answer = create(tool_api, instructions="Be brief.", temperature=0, max_output_tokens=50)
    assert answer.output_text == "Hello you" and answer.status == "completed"
    assert answer.usage.output_tokens == 9
    assert answer.usage.total_tokens == len(prompt(tool_api)) + 9
    assert prompt(tool_api).startswith("<|system|>Be brief.\n<|user|>hi\n")
    params = tool_api.asked.params
    assert (params.temperature, params.max_tokens) == (0, 50)


def test_the_limit_leaves_it_incomplete(tool_api):
    tool_api.reply_with("Hello you")
    answer = create(tool_api, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_call_and_its_output(tool_api):
    tool_api.reply_with(f"Well. {CALL}")
    answer = create(tool_api, tools=[TOOL], parallel_tool_calls=False)
    text, call = answer.output
    assert text.content[0].text.strip() == "Well."
    assert (call.type, call.name, call.arguments) == ("function_call", "look", '{"at": 1}')
    tool_api.reply_with("done")
    given = [
        {"role": "user", "content": "hi"},
        *[item.model_dump() for item in answer.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "seen"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    assert create(tool_api, given, tools=[TOOL]).output_text == "done"
    shown = prompt(tool_api)
    assert f'<tool_call>{call.call_id}{{"name": "look", "arguments": {{"at": 1}}}}' in shown
    assert f"<|tool|>seen{call.call_id}\n<|user|>So?\n" in shown


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_a_call_that_is_asked_for(tool_api, choice):
    tool_api.reply_with(CALL)
    answer = create(tool_api, tools=[TOOL | {"strict": True}], tool_choice=choice)
    assert [item.type for item in answer.output] == ["function_call"]
    assert tool_api.asked.params.grammar.kind == "ebnf"


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        (
            {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "array"}},
            '{"type":"array"}',
        ),
    ],
)
def test_text_formats(tool_api, form, schema):
    create(tool_api, text={"format": form, "verbosity": "low"})
    grammar = tool_api.asked.params.grammar
    assert (grammar.text if grammar else None) == schema


def test_a_stream(tool_api):
    tool_api.reply_with(f"Well. {CALL}{CALL}")
    events, final = streamed(tool_api, tools=[TOOL])
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output[0].content[0].text.strip() == "Well."
    assert [item.arguments for item in final.output[1:]] == ['{"at": 1}'] * 2
    whole = create(tool_api, tools=[TOOL])
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_stream_cut_by_its_limit(tool_api):
    tool_api.reply_with("Hello you")
    events, _ = streamed(tool_api, max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].content[0].text == "Hel"


def test_a_failure_in_a_stream_is_an_event(tool_api):
    tool_api.client.failure = {"finish_reason": "error", "error": "no numbers"}
    answer = tool_api.post(PATH, {"input": "hi", "stream": True})
    last = answer.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n") and "no numbers" in last


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input": []}, "input"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "whole conversation"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "text"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "hi", "text": {"format": {"type": "xml"}}}, "xml"),
        ({"input": "hi", "unknown": 1}, "unknown is not a field"),
    ],
)
def test_refused(tool_api, given, words):
    assert words in tool_api.error(PATH, given)["message"]


def test_fields_without_effect_are_accepted(tool_api):
    create(tool_api)
    plain = prompt(tool_api)
    create(
        tool_api,
        store=False,
        metadata={"a": "b"},
        truncation="auto",
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        user="x",
    )
    assert prompt(tool_api) == plain


def test_reasoning_is_an_output_item(tool_api):
    tool_api.state.options = ServerOptions(reasoning_parser="think")
    tool_api.reply_with(f"<think>Hm.</think>Yes. {CALL}")
    answer = create(tool_api, tools=[TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output[0].content[0].text == "Hm." and answer.output_text == "Yes."
    events, final = streamed(tool_api, tools=[TOOL])
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    told = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(told) == "Hm."
    given = [item.model_dump(exclude_none=True) for item in answer.output]
    output = {"type": "function_call_output", "call_id": given[2]["call_id"], "output": "seen"}
    create(tool_api, [*given, output])
    assert prompt(tool_api).startswith("<|assistant|>Hm.Yes.<tool_call>")


def test_errors_name_the_fields_of_this_api(tool_api):
    bomb = {"type": "object", "properties": {"a": {"type": "bomb"}}}
    shown = {"type": "function_call_output", "call_id": "x", "output": [IMAGE]}
    turn = {"role": "user", "content": [{"type": "input_text", "text": "x"}, IMAGE]}
    form = {"type": "json_schema", "name": "x", "schema": bomb}
    for fields, param in (
        ({"input": "x" * 6000}, "input"),
        (
            {"instructions": "s", "input": [{"role": "user", "content": "a"}, turn]},
            "input[1].content[1]",
        ),
        ({"instructions": "s", "input": [shown]}, "input[0].output[0]"),
        ({"text": {"format": form}}, "text.format"),
        (
            {"tools": [{**TOOL, "parameters": bomb}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
    ):
        error = tool_api.error(PATH, {"model": "tiny", "input": "hi", **fields})
        assert error["param"] == param
        assert "messages" not in error["message"] and "response_format" not in error["message"]
