"""/v1/chat/completions: a conversation in, the assistant's message or its tool calls out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.engine.chat_template import TemplateInput
from cairn.engine.media.given import Given, taken_out
from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadRequest
from cairn.server.chat_output import ChatShape, ReasoningUse, ToolUse
from cairn.server.errors import about
from cairn.server.generation import Work, answer
from cairn.server.intake import (
    at_once_if_short,
    encoded,
    longest_prompt,
    read_request,
    tokenizer_of,
)
from cairn.server.media import ChatPrompt
from cairn.server.protocol.chat import ChatRequest, NamedTool, Tool
from cairn.server.protocol.explain import BadField
from cairn.server.protocol.tokens import TokenizeRequest
from cairn.server.reasoning import grammar_after_reasoning, prompt_opens_reasoning
from cairn.server.reasoning_markers import choose_markers
from cairn.server.sampling import (
    Output,
    field_named_by,
    requested_grammar,
    requested_transfer,
    sampling_params,
    stream_options,
    truncated,
    within,
)
from cairn.server.state import ServerState
from cairn.server.tool_calls.forms import FORMS
from cairn.server.tool_grammars import arguments_schema, strict_grammar, tool_grammar
from cairn.server.tools import choose_parser
from cairn.types import Grammar


async def create_chat_completion(request: Request) -> Response:
    """POST /v1/chat/completions. Raises CairnError for what cannot be served."""
    state: ServerState = request.app.state.server
    track = state.metrics.track(request.url.path)
    asked = await read_request(request, ChatRequest)
    streaming = stream_options(asked)
    work, shape = await prepared(request, asked)
    return await answer(request, work, shape, track, streaming)


async def prepared(request: Request, asked: ChatRequest) -> tuple[Work, ChatShape]:
    """A chat as work for the engine, and the shape of its answer. Raises CairnError."""
    state: ServerState = request.app.state.server
    tokenizer = tokenizer_of(state, "a chat")
    try:
        tools = await encoded(request, lambda: tool_use(state, asked, tokenizer))
        grammar = await _grammar(state, asked, tools, tokenizer)
    except BadRequest as error:
        if error.param == "tools":
            # One grammar is made of all tools: its error does not say which one is at fault.
            await _check_tools(state, asked)
        raise
    longest = longest_prompt(state)
    limit = longest if asked.truncate_prompt_tokens is None else None
    chat = await encode_chat(request, tokenizer, asked, tools.shown, limit)
    prompt = list(truncated(chat.ids, asked, longest))
    if chat.media is not None and len(prompt) < len(chat.ids):
        raise BadField(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens would cut a prompt with images",
            "Leave it out, or send fewer images",
        )
    reasoning = _reasoning_use(state, asked, prompt, tokenizer)
    if grammar is not None and reasoning is not None and reasoning.opened:
        delayed = grammar_after_reasoning(grammar, reasoning.markers, tokenizer.special_names)
        if delayed is None:
            reasoning = None
        else:
            await state.grammars.check(delayed)
            grammar = delayed
    output = _output(state, asked, grammar, _fixed(tools, reasoning, tokenizer))
    params = sampling_params(asked, output, state.options, state.sampling_defaults)
    transfer = requested_transfer(asked, 1)
    work = Work([prompt], params, asked.priority or 0, "messages", [chat.media], transfer)
    return work, ChatShape(state, asked, prompt, tools, reasoning, tokenizer)


def _reasoning_use(
    state: ServerState, asked: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer
) -> ReasoningUse | None:
    """How reasoning is separated from the answer, or None to leave it in the content."""
    markers = choose_markers(state.options.reasoning_parser, tokenizer.chat_template)
    if markers is None or asked.separate_reasoning is False or asked.continue_final_message:
        return None
    opened = prompt_opens_reasoning(markers, prompt, tokenizer)
    return ReasoningUse(markers, opened, asked.include_reasoning is not False)


def _fixed(tools: ToolUse, reasoning: ReasoningUse | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Sampling parameters that the parsers of the output need."""
    markers = "" if tools.parser is None else FORMS[tools.parser].markers
    if reasoning is not None:
        markers += reasoning.markers.begin + reasoning.markers.end
    hidden = any(name and name in markers for name in tokenizer.special_names)
    # The text would lack markers that are special tokens.
    return {"skip_special_tokens": False} if hidden else {}


def tool_use(state: ServerState, asked: ChatRequest, tokenizer: Tokenizer) -> ToolUse:
    """How the model may use the request's tools.

    Raises BadRequest when the tools and the choice among them do not go together.
    """
    tools, choice = asked.tools or [], asked.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools and choice not in (None, "none", "auto"):
        raise BadField("tool_choice", "tool_choice asks for tools, but there are none")
    if named is not None and all(tool.function.name != named for tool in tools):
        raise BadField("tool_choice", f"tool_choice names {named!r}, which is none of the tools")
    if not tools or choice == "none":
        return ToolUse()
    with about("tools"):
        parser = choose_parser(state.options.tool_parser, tokenizer.chat_template)
        shown = shown_tools(tools)
        several = asked.parallel_tool_calls is not False
        if choice in (None, "auto"):
            strict = any(tool.function.strict for tool in tools)
            special = tokenizer.special_names
            held = strict_grammar(msgspec.to_builtins(tools), parser, special) if strict else None
            return ToolUse(shown, parser, held, several)
        callable_ = [tool for tool in shown if named in (None, tool["function"]["name"])]
        # Without an end-of-sequence id the model would emit calls until max_tokens.
        more = several and named is None and bool(state.client.info.eos_ids)
        grammar = tool_grammar(
            callable_, "required", parser, several=more, special=tokenizer.special_names
        )
    return ToolUse(shown, parser, grammar, several, forced=True)


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates print them; `strict` and hints for caches are the server's business."""
    shown: list[dict[str, Any]] = msgspec.to_builtins(tools)
    for tool in shown:
        tool.pop("cache_control", None)
        for name in ("strict", "cache_control"):
            tool["function"].pop(name, None)
    return shown


async def encode_chat(
    request: Request,
    tokenizer: Tokenizer,
    asked: ChatRequest | TokenizeRequest,
    tools: Sequence[Mapping[str, Any]],
    limit: int | None = None,
) -> ChatPrompt:
    """Token ids and images of a conversation.

    Raises BadRequest, TooLong, BadModel, Busy: see Tokenizer.chat_input, Tokenizer.encode,
    TemplateRenderer.render and MediaPreparer.placed.
    """
    state: ServerState = request.app.state.server
    assert state.media is not None
    reader, images = state.media.reader, list[Given]()

    def chat_input() -> TemplateInput | str:
        messages, found = taken_out(msgspec.to_builtins(asked.messages or []))
        reader.check(found)
        images.extend(found)
        variables = asked.chat_template_kwargs
        if isinstance(asked, ChatRequest) and asked.documents is not None:
            variables = {"documents": asked.documents} | (variables or {})
        if isinstance(asked, ChatRequest) and asked.reasoning_effort is not None:
            variables = _reasoning(asked.reasoning_effort, tokenizer.chat_template or "") | (
                variables or {}
            )
        return tokenizer.chat_input(
            messages,
            tools,
            variables,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=bool(asked.continue_final_message),
            placeholders=reader.placeholders if found else {},
        )

    try:
        given = await encoded(request, chat_input)
        rendered = not isinstance(given, str)
        text = given if isinstance(given, str) else await state.templates.render(given)
        # A template can make a long text of a short request.
        ids = await at_once_if_short(
            len(text), lambda: tokenizer.encode(text, not rendered, limit=limit)
        )
        return await state.media.placed(ids, images)
    except BadRequest as error:
        error.param = error.param or field_named_by(error, type(asked)) or "messages"
        raise


def _reasoning(effort: str, template: str) -> dict[str, Any]:
    """Variables of a template for the reasoning effort."""
    variables: dict[str, Any] = {}
    if re.search(r"\breasoning_effort\b", template):
        variables["reasoning_effort"] = effort
    if effort == "none" and re.search(r"\benable_thinking\b", template):
        variables["enable_thinking"] = False
    return variables


async def _grammar(
    state: ServerState, asked: ChatRequest, tools: ToolUse, tokenizer: Tokenizer
) -> Grammar | None:
    named = requested_grammar(asked)
    if named is not None and tools.shown:
        if named[1].kind != "json_schema":
            raise BadField(
                named[0],
                f"{named[0]} and tools cannot go together: the output would not be a call",
                "Leave one out, or set tool_choice to 'none'",
            )
        # With a forced tool call the output has no free answer for response_format to constrain.
        if not tools.forced:
            with about(named[0]):
                await state.grammars.check(named[1])
            with about("tools"):
                tools = replace(tools, grammar=_calls_or_answer(state, tools, named[1], tokenizer))
    if tools.grammar is not None:
        named = ("tools", tools.grammar)
    if named is None:
        return None
    with about(named[0]):
        await state.grammars.check(named[1])
    return named[1]


def _calls_or_answer(
    state: ServerState, tools: ToolUse, answer: Grammar, tokenizer: Tokenizer
) -> Grammar:
    """Calls of the tools, or an answer that follows a JSON schema."""
    assert tools.parser is not None
    more = tools.several and bool(state.client.info.eos_ids)
    schema = msgspec.json.decode(answer.text)
    grammar = tool_grammar(
        tools.shown,
        "required",
        tools.parser,
        several=more,
        answer=schema,
        special=tokenizer.special_names,
    )
    assert grammar is not None
    return grammar


async def _check_tools(state: ServerState, asked: ChatRequest) -> None:
    """Raise BadField for the first tool whose parameters no grammar can follow."""
    for i, tool in enumerate(asked.tools or []):
        if _is_held(tool, asked):
            await _check_parameters(state, i, tool)


def _is_held(tool: Tool, asked: ChatRequest) -> bool:
    """Whether calls of a tool are constrained to its schema."""
    choice = asked.tool_choice
    if isinstance(choice, NamedTool):
        return tool.function.name == choice.function.name
    return choice == "required" or bool(tool.function.strict) or asked.response_format is not None


async def _check_parameters(state: ServerState, i: int, tool: Tool) -> None:
    schema = arguments_schema(msgspec.to_builtins(tool.function))
    try:
        await state.grammars.check(Grammar("json_schema", json.dumps(schema)))
    except BadRequest as error:
        raise BadField(
            f"tools[{i}].function.parameters",
            f"the parameters of tools[{i}], {tool.function.name!r}: {error.message}",
            error.hint,
        ) from None


def _output(
    state: ServerState, asked: ChatRequest, grammar: Grammar | None, fixed: Mapping[str, Any]
) -> Output:
    both = (asked.max_completion_tokens, asked.max_tokens)
    if None not in both and both[0] != both[1]:
        raise BadField(
            "max_tokens",
            f"max_completion_tokens is {both[0]} and max_tokens is {both[1]}",
            "Give one of them",
        )
    if asked.top_logprobs and not asked.logprobs:
        raise BadField(
            "top_logprobs",
            f"top_logprobs is {asked.top_logprobs}, but logprobs are not asked for",
            "Set logprobs to true",
        )
    within("top_logprobs", asked.top_logprobs or 0, state.options.max_logprobs)
    return Output(
        max_tokens=both[1] if both[0] is None else both[0],
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=grammar,
        fixed=fixed,
    )


routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
