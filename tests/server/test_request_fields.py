"""Every field of every request struct has an effect, is refused, or is marked as without effect.
The test iterates over the structs, so a field without an example fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import msgspec
import pytest
from msgspec import inspect
from openai.types.chat import completion_create_params as openai_chat
from openai.types.completion_create_params import CompletionCreateParamsBase

from cairn.server.options import ServerOptions
from cairn.server.protocol.chat import ChatRequest
from cairn.server.protocol.completions import CompletionRequest
from cairn.server.protocol.fields import ConversationPart, Fields, marked
from cairn.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.server.fake_api import FakeApi, events_of

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@dataclass
class Change:
    """A field's value, and other fields that the request needs."""

    value: object
    beside: dict = field(default_factory=dict)
    without: object = None
    """The value to compare with; None omits the field."""


THINKS = 3
"""A seed with which the model reasons before it answers."""
SAMPLING = {
    "model": "another",
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": 7,
    "stop": "x",
    "stop_token_ids": [3],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "bad_words": ["x"],
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "return_token_ids": True,
    "return_tokens_as_token_ids": Change(True, {"logprobs": 1}),
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 1,
    "min_tokens": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": 1},
    "response_format": {"type": "json_object"},
    "regex": "a+",
    "ebnf": 'start: "a"',
    "priority": 3,
    "kv_transfer_params": {"do_remote_prefill": True},
    "stream": True,
    "stream_options": Change({"include_usage": True}, {"stream": True}),
    "cairn": Change({"selection": True}, {"max_tokens": 2}),
}
REQUESTS = {
    ChatRequest: (CHAT, {"messages": [USER]}),
    CompletionRequest: (COMPLETE, {"prompt": "hi"}),
    TokenizeRequest: ("/tokenize", {"prompt": "hi"}),
    DetokenizeRequest: ("/detokenize", {"tokens": [65]}),
}
CHANGES = {
    ChatRequest: SAMPLING
    | {
        "messages": Change([{"role": "user", "content": "ho"}], without=[USER]),
        "max_completion_tokens": 3,
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": Change(3, {"logprobs": True}),
        "return_tokens_as_token_ids": Change(True, {"logprobs": True}),
        "include_reasoning": Change(False, {"seed": THINKS}),
        "separate_reasoning": Change(False, {"seed": THINKS}),
        "documents": [{"title": "A", "text": "b"}],
        "tools": [TOOL],
        "tool_choice": Change("none", {"tools": [TOOL]}),
        "parallel_tool_calls": Change(False, {"tools": [TOOL], "seed": 2}),
        "chat_template_kwargs": {"extra": "more"},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "continue_final_message": Change(
            True, {"messages": [USER, {"role": "assistant", "content": "I"}]}
        ),
    },
    CompletionRequest: SAMPLING
    | {
        "prompt": Change("ho", without="hi"),
        "max_tokens": 3,
        "echo": True,
        "logprobs": 1,
        "add_special_tokens": False,
    },
    TokenizeRequest: {
        "prompt": Change("ho", without="hi"),
        "messages": Change([USER], {"prompt": None}, [{"role": "user", "content": "ho"}]),
        "tools": Change([TOOL], {"prompt": None, "messages": [USER]}),
        "chat_template_kwargs": Change({"extra": "x"}, {"prompt": None, "messages": [USER]}),
        "add_generation_prompt": Change(False, {"prompt": None, "messages": [USER]}),
        "continue_final_message": Change(
            True, {"prompt": None, "messages": [USER, {"role": "assistant", "content": "I"}]}
        ),
        "add_special_tokens": False,
        "return_token_strs": True,
        "model": "another",
    },
    DetokenizeRequest: {"tokens": Change([66], without=[65]), "model": "another"},
}


def said(*messages):
    return {"messages": [USER, *messages]}


def named(role, **others):
    return said({"role": role, "content": "c", **others}), said(
        {"role": role, "content": "c", "name": "Jo", **others}
    )


def content(role, **others):
    return said({"role": role, "content": "c", **others}), said(
        {"role": role, "content": "d", **others}
    )


def called(**changes):
    """A conversation with a tool call, before and after a change of its function."""
    function = CALL["function"] | changes
    return said(ASKED), said(ASKED | {"tool_calls": [CALL | {"function": function}]})


def offered(**changes):
    """A request with a tool, before and after a change of its function."""
    function = TOOL["function"] | changes
    return said() | {"tools": [TOOL]}, said() | {"tools": [TOOL | {"function": function}]}


def named_choice(name):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    choice = {"type": "function", "function": {"name": name}}
    return said() | {"tools": [TOOL, other], "tool_choice": choice}


def formatted(**changes):
    schema = SCHEMA["json_schema"]
    return (
        said() | {"response_format": SCHEMA},
        said() | {"response_format": SCHEMA | {"json_schema": schema | changes}},
    )


def structured(**what):
    return said() | {"structured_outputs": {}}, said() | {"structured_outputs": what}


NESTED = {
    "StreamOptions.include_usage": (
        said() | {"stream": True, "stream_options": {"include_usage": False}},
        said() | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "StreamOptions.continuous_usage_stats": (
        said() | {"stream": True, "stream_options": {"continuous_usage_stats": False}},
        said() | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ),
    "StructuredOutputs.json": structured(json={"type": "object"}),
    "StructuredOutputs.regex": structured(regex="a+"),
    "StructuredOutputs.choice": structured(choice=["a"]),
    "StructuredOutputs.grammar": structured(grammar='start: "a"'),
    "StructuredOutputs.json_object": structured(json_object=True),
    "CairnOptions.selection": (
        said() | {"max_tokens": 2, "cairn": {"selection": False}},
        said() | {"max_tokens": 2, "cairn": {"selection": True}},
    ),
    "JsonSchemaFormat.json_schema": formatted(schema={"type": "array"}),
    "JsonSchema.schema": formatted(schema={"type": "array"}),
    "TextPart.text": (
        said({"role": "user", "content": [{"type": "text", "text": "a"}]}),
        said({"role": "user", "content": [{"type": "text", "text": "b"}]}),
    ),
    "SystemMessage.content": content("system"),
    "SystemMessage.name": named("system"),
    "DeveloperMessage.content": content("developer"),
    "DeveloperMessage.name": named("developer"),
    "UserMessage.content": content("user"),
    "UserMessage.name": named("user"),
    "AssistantMessage.content": content("assistant"),
    "AssistantMessage.name": named("assistant"),
    "AssistantMessage.tool_calls": (
        said({"role": "assistant", "content": "c"}),
        said({"role": "assistant", "content": "c", "tool_calls": [CALL]}),
    ),
    "AssistantMessage.reasoning_content": (
        said({"role": "assistant", "content": "c"}),
        said({"role": "assistant", "content": "c", "reasoning_content": "Hm."}),
    ),
    "AssistantMessage.reasoning": (
        said({"role": "assistant", "content": "c"}),
        said({"role": "assistant", "content": "c", "reasoning": "Hm."}),
    ),
    "ToolMessage.content": content("tool", tool_call_id="c1"),
    "ToolMessage.name": named("tool", tool_call_id="c1"),
    "ToolMessage.tool_call_id": (
        said({"role": "tool", "content": "c", "tool_call_id": "c1"}),
        said({"role": "tool", "content": "c", "tool_call_id": "c2"}),
    ),
    "ToolCall.id": (said(ASKED), said(ASKED | {"tool_calls": [CALL | {"id": "c9"}]})),
    "ToolCall.function": called(name="hear"),
    "FunctionCall.name": called(name="hear"),
    "FunctionCall.arguments": called(arguments='{"a": 2}'),
    "Tool.function": offered(name="hear"),
    "FunctionDefinition.name": offered(name="hear"),
    "FunctionDefinition.description": offered(description="Looks."),
    "FunctionDefinition.parameters": offered(parameters={"type": "object", "title": "T"}),
    "FunctionDefinition.strict": offered(strict=True),
    "NamedTool.function": (named_choice("look"), named_choice("other")),
    "FunctionChoice.name": (named_choice("look"), named_choice("other")),
}
OF_IMAGES = {"ImagePart.image_url", "VideoPart.video_url", "MediaUrl.url", "MediaUrl.detail"}
"""Supported by models with a vision encoder, see test_images."""
UNSEEN = {
    # (struct, field): a request that contains the field, without effect or refused.
    "StreamOptions.include_obfuscation": lambda value: (
        said() | {"stream": True, "stream_options": {"include_obfuscation": value}}
    ),
    **{
        f"StructuredOutputs.{name}": lambda value, name=name: structured(**{name: value})[1]
        for name in (
            "structural_tag",
            "whitespace_pattern",
            "disable_any_whitespace",
            "disable_additional_properties",
            "disable_fallback",
            "backend",
        )
    },
    "JsonSchema.name": lambda value: formatted(name=value)[1],
    "JsonSchema.description": lambda value: formatted(description=value)[1],
    "JsonSchema.strict": lambda value: formatted(strict=value)[1],
    "AudioPart.input_audio": lambda value: part("input_audio", value),
    "FilePart.file": lambda value: part("file", value),
    "AssistantMessage.refusal": lambda value: assistant("refusal", value),
    "AssistantMessage.audio": lambda value: assistant("audio", value),
    "AssistantMessage.function_call": lambda value: assistant("function_call", value),
    "AssistantMessage.annotations": lambda value: assistant("annotations", value),
    "Tool.cache_control": lambda value: said() | {"tools": [TOOL | {"cache_control": value}]},
    "FunctionDefinition.cache_control": lambda value: offered(cache_control=value)[1],
}


def part(kind, value):
    return said({"role": "user", "content": [{"type": kind, kind: value}]})


def assistant(name, value):
    return said({"role": "assistant", "content": "c", name: value})


def structs_in(kind):
    """The structs that a type contains."""
    if isinstance(kind, inspect.StructType):
        yield kind.cls
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from structs_in(each)
    elif isinstance(kind, inspect.Metadata):
        yield from structs_in(kind.type)
    elif isinstance(kind, inspect.ListType):
        yield from structs_in(kind.item_type)


@cache
def nested_structs():
    found, queue = {}, list(REQUESTS)
    while queue:
        struct = queue.pop()
        for item in msgspec.structs.fields(struct):
            for inner in structs_in(inspect.type_info(item.type)):
                if inner.__name__ not in found:
                    found[inner.__name__] = inner
                    queue.append(inner)
    return found


def names(struct):
    """Fields of a struct except those with a single possible value."""
    fields = msgspec.structs.fields(struct)
    return [field.encode_name for field in fields if not is_constant(inspect.type_info(field.type))]


def is_constant(kind):
    """Whether a field has a single possible value, or null."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return all(
        isinstance(each, inspect.NoneType)
        or (isinstance(each, inspect.LiteralType) and len(each.values) == 1)
        for each in kinds
    )


def top_fields(mark=None):
    for struct in REQUESTS:
        dull = marked(struct, "refused") | marked(struct, "no_effect")
        wanted = marked(struct, mark) if mark else [n for n in names(struct) if n not in dull]
        yield from ((struct, name) for name in wanted)


def nested_fields(mark=None):
    for struct in nested_structs().values():
        dull = marked(struct, "refused") | marked(struct, "no_effect")
        wanted = marked(struct, mark) if mark else [n for n in names(struct) if n not in dull]
        found = (f"{struct.__name__}.{name}" for name in wanted)
        yield from (name for name in found if name not in OF_IMAGES)


def label(value):
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.fixture
def api(tool_tokenizer):
    return FakeApi(tool_tokenizer)


def observed(api, path, body):
    """The effects of a request, without ids and times."""
    response = api.post(path, body)
    assert response.status_code < 500, response.text
    streamed = response.headers["content-type"].startswith("text/event-stream")
    answer = events_of(response.text) if streamed else [response.json()]
    for each in answer:
        for name in ("id", "created"):
            if isinstance(each, dict):
                each.pop(name, None)
    asked = [(a.prompt, a.params, a.priority, a.transfer) for a in api.client.submitted]
    api.client.submitted.clear()
    return response.status_code, streamed, asked, answer


def differ(api, path, before, after, refused):
    """Both requests succeed (the second one fails if the field's effect is an error), and their
    effects differ."""
    first = observed(api, path, before)
    assert first[0] == 200, first
    second = observed(api, path, after)
    assert (second[0] != 200) == refused, second
    assert second != first


@pytest.mark.parametrize("struct, name", [*top_fields()], ids=label)
def test_consumed(api, struct, name):
    path, body = REQUESTS[struct]
    change = CHANGES[struct][name]
    if not isinstance(change, Change):
        change = Change(change)
    if name == "parallel_tool_calls":
        api.client.answer = lambda *_: TWO_CALLS
    if change.beside.get("seed") == THINKS:
        api.client.answer = lambda *_: b"<think>Hm.</think>Yes."
        api.state.options = ServerOptions(reasoning_parser="think")
    if name == "add_special_tokens":
        api.state.tokenizer = WithMark(api.state.tokenizer)
    if struct is TokenizeRequest and "messages" in (name, *change.beside):
        body = {}
    before = {k: v for k, v in (body | change.beside).items() if v is not None}
    after = before | {name: change.value}
    if change.without is not None:
        before[name] = change.without
    differ(api, path, before, after, refused=name == "model")


TWO_CALLS = b"".join(
    b'<tool_call>{"name": "look", "arguments": {"a": %d}}</tool_call>\n' % i for i in range(2)
)


class WithMark:
    """A tokenizer that begins texts with a special token."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, add_special_tokens=True, limit=None):
        ids = self._tokenizer.encode(text, add_special_tokens, limit)
        return [1, *ids] if add_special_tokens else ids


@pytest.mark.parametrize("name", [*nested_fields()])
def test_nested_consumed(api, name):
    differ(api, CHAT, *NESTED[name], refused=False)


@pytest.mark.parametrize("struct, name", [*top_fields("refused")], ids=label)
def test_refused_by_name(api, struct, name):
    path, body = REQUESTS[struct]
    nothing = marked(struct, "but").get(name)
    for value in ("x", 2, True, ["x"], {}, False):
        if value is nothing:
            continue
        error = api.error(path, body | {name: value})
        assert error["param"] == name
        assert name in error["message"]
    assert api.post(path, body | {name: None}).status_code == 200


@pytest.mark.parametrize("name", [*nested_fields("refused")])
def test_nested_refused_by_name(api, name):
    field_name = name.partition(".")[2]
    error = api.error(CHAT, UNSEEN[name]({"url": "x"}))
    assert error["param"].endswith(field_name)
    assert error["param"].startswith(("messages[1]", "structured_outputs"))
    assert "not served" in error["message"]


def test_values_that_ask_for_nothing(api):
    """Clients send them instead of omitting a field."""
    _, body = REQUESTS[CompletionRequest]
    assert observed(api, COMPLETE, body | {"best_of": 1}) == observed(api, COMPLETE, body)
    assert api.error(COMPLETE, body | {"best_of": 1, "n": 2})["param"] == "best_of"
    nothing = observed(api, CHAT, assistant("name", None))
    assert observed(api, CHAT, assistant("refusal", "")) == nothing
    assert observed(api, CHAT, assistant("tool_calls", None)) == nothing
    silent = {"role": "assistant", "content": None}
    empty = {"role": "assistant", "content": ""}
    assert observed(api, CHAT, said(silent)) == observed(api, CHAT, said(empty))
    calls = [{"role": "assistant", "tool_calls": [CALL | {"type": t}]} for t in ("function", None)]
    assert observed(api, CHAT, said(calls[0])) == observed(api, CHAT, said(calls[1]))


DULL_VALUES = ("x", True, {"a": "b"}, ["text"])


@pytest.mark.parametrize("struct, name", [*top_fields("no_effect")], ids=label)
def test_without_effect(api, struct, name):
    path, body = REQUESTS[struct]
    first = observed(api, path, body)
    seen = [observed(api, path, body | {name: value}) for value in DULL_VALUES]
    taken = [each for each in seen if each[0] == 200]
    assert taken
    assert all(each == first for each in taken)


@pytest.mark.parametrize("name", [*nested_fields("no_effect")])
def test_nested_without_effect(api, name):
    first = observed(api, CHAT, UNSEEN[name](None))
    seen = [observed(api, CHAT, UNSEEN[name](value)) for value in ("x", True)]
    taken = [each for each in seen if each[0] == 200]
    assert taken
    assert all(each == first for each in taken)


@pytest.mark.parametrize("struct", [*REQUESTS, *nested_structs().values()], ids=label)
def test_unknown_field_refused(struct):
    assert issubclass(struct, Fields)
    assert struct.__struct_config__.forbid_unknown_fields != issubclass(struct, ConversationPart)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (ChatRequest, openai_chat.CompletionCreateParamsBase),
        (CompletionRequest, CompletionCreateParamsBase),
    ],
    ids=label,
)
def test_all_fields_of_openai_are_known(ours, theirs):
    assert {*theirs.__annotations__, "stream"} <= set(names(ours))
