"""/v1/chat/completions: generates the assistant's next message, which may hold tool calls."""

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
from cairn.server.chat_output import ChatResponseBuilder, ReasoningUse, ToolUse
from cairn.server.errors import about
from cairn.server.generation import Work, answer
from cairn.server.media import ChatPrompt
from cairn.server.protocol.chat import ChatRequest, NamedTool, Tool
from cairn.server.protocol.explain import BadField
from cairn.server.protocol.tokens import TokenizeRequest
from cairn.server.reasoning import grammar_after_reasoning, prompt_opens_reasoning
from cairn.server.reasoning_markers import choose_markers
from cairn.server.request_body import (
    encoded,
    longest_prompt,
    read_request,
    run_inline_if_short,
    tokenizer_of,
)
from cairn.server.sampling import (
    Output,
    field_named_in,
    requested_grammar,
    requested_transfer,
    sampling_params,
    stream_options,
    truncated,
    within,
)
from cairn.server.state import ServerState
from cairn.server.tool_calls.formats import FORMS
from cairn.server.tool_grammars import arguments_schema, strict_grammar, tool_grammar
from cairn.server.tool_parser import choose_parser
from cairn.types import Grammar


async def create_chat_completion(request: Request) -> Response:
    """POST /v1/chat/completions. Raises CairnError for a request that cannot be served."""
    state: ServerState = request.app.state.server
    track = state.metrics.track(request.url.path)
    body = await read_request(request, ChatRequest)
    streaming = stream_options(body)
    work, builder = await prepared(request, body)
    return await answer(request, work, builder, track, streaming)


async def prepared(request: Request, body: ChatRequest) -> tuple[Work, ChatResponseBuilder]:
    """The engine's work for a chat request, and the builder of its response.

    Raises CairnError for a request that cannot be served.
    """
    state: ServerState = request.app.state.server
    tokenizer = tokenizer_of(state, "a chat")
    try:
        tools = await encoded(request, lambda: tool_use(state, body, tokenizer))
        grammar = await _grammar(state, body, tools, tokenizer)
    except BadRequest as error:
        if error.param == "tools":
            # The grammar combines all tools, so its error does not name the invalid one.
            await _check_tools(state, body)
        raise
    longest = longest_prompt(state)
    limit = longest if body.truncate_prompt_tokens is None else None
    chat = await encode_chat(request, tokenizer, body, tools.shown, limit)
    prompt = list(truncated(chat.ids, body, longest))
    if chat.media is not None and len(prompt) < len(chat.ids):
        raise BadField(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens would cut a prompt with images",
            "Leave it out, or send fewer images",
        )
    reasoning = _reasoning_use(state, body, prompt, tokenizer)
    if grammar is not None and reasoning is not None and reasoning.opened:
        delayed = grammar_after_reasoning(grammar, reasoning.markers, tokenizer.special_names)
        if delayed is None:
            reasoning = None
        else:
            await state.grammars.check(delayed)
            grammar = delayed
    output = _output(state, body, grammar, _required_params(tools, reasoning, tokenizer))
    params = sampling_params(body, output, state.options, state.sampling_defaults)
    transfer = requested_transfer(body, 1)
    work = Work([prompt], params, body.priority or 0, "messages", [chat.media], transfer)
    return work, ChatResponseBuilder(state, body, prompt, tools, reasoning, tokenizer)


def _reasoning_use(
    state: ServerState, body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer
) -> ReasoningUse | None:
    """How reasoning is separated from the answer, or None to leave it in the content."""
    markers = choose_markers(state.options.reasoning_parser, tokenizer.chat_template)
    if markers is None or body.separate_reasoning is False or body.continue_final_message:
        return None
    opened = prompt_opens_reasoning(markers, prompt, tokenizer)
    return ReasoningUse(markers, opened, body.include_reasoning is not False)


def _required_params(
    tools: ToolUse, reasoning: ReasoningUse | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Sampling parameters that the parsers of the output need."""
    markers = "" if tools.parser is None else FORMS[tools.parser].markers
    if reasoning is not None:
        markers += reasoning.markers.begin + reasoning.markers.end
    hidden = any(name and name in markers for name in tokenizer.special_names)
    # The text would lack markers that are special tokens.
    return {"skip_special_tokens": False} if hidden else {}


def tool_use(state: ServerState, body: ChatRequest, tokenizer: Tokenizer) -> ToolUse:
    """How the model may use the request's tools.

    Raises BadRequest when `tool_choice` contradicts `tools`.
    """
    tools, choice = body.tools or [], body.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools and choice not in (None, "none", "auto"):
        raise BadField("tool_choice", "tool_choice asks for tools, but there are none")
    if named is not None and all(tool.function.name != named for tool in tools):
        raise BadField("tool_choice", f"tool_choice names {named!r}, which is none of the tools")
    if not tools or choice == "none":
        return ToolUse()
    with about("tools"):
        parser = choose_parser(state.options.tool_parser, tokenizer.chat_template)
        shown = template_tools(tools)
        several = body.parallel_tool_calls is not False
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


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools for the chat template, without the fields that only the server reads."""
    shown: list[dict[str, Any]] = msgspec.to_builtins(tools)
    for tool in shown:
        tool.pop("cache_control", None)
        for name in ("strict", "cache_control"):
            tool["function"].pop(name, None)
    return shown


async def encode_chat(
    request: Request,
    tokenizer: Tokenizer,
    body: ChatRequest | TokenizeRequest,
    tools: Sequence[Mapping[str, Any]],
    limit: int | None = None,
) -> ChatPrompt:
    """Render a conversation with the chat template and encode it.

    Raises BadRequest, TooLong, BadModel, Busy: see Tokenizer.chat_input, Tokenizer.encode,
    TemplateRenderer.render and MediaPreparer.placed.
    """
    state: ServerState = request.app.state.server
    assert state.media is not None
    reader, images = state.media.reader, list[Given]()

    def chat_input() -> TemplateInput | str:
        messages, found = taken_out(msgspec.to_builtins(body.messages or []))
        reader.check(found)
        images.extend(found)
        variables = body.chat_template_kwargs
        if isinstance(body, ChatRequest) and body.documents is not None:
            variables = {"documents": body.documents} | (variables or {})
        if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
            variables = _reasoning(body.reasoning_effort, tokenizer.chat_template or "") | (
                variables or {}
            )
        return tokenizer.chat_input(
            messages,
            tools,
            variables,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            placeholders=reader.placeholders if found else {},
        )

    try:
        given = await encoded(request, chat_input)
        rendered = not isinstance(given, str)
        text = given if isinstance(given, str) else await state.templates.render(given)
        # A template can expand a short request to a long text.
        ids = await run_inline_if_short(
            len(text), lambda: tokenizer.encode(text, not rendered, limit=limit)
        )
        return await state.media.placed(ids, images)
    except BadRequest as error:
        error.param = error.param or field_named_in(error, type(body)) or "messages"
        raise


def _reasoning(effort: str, template: str) -> dict[str, Any]:
    """Template variables that set the reasoning effort, where the template reads them."""
    variables: dict[str, Any] = {}
    if re.search(r"\breasoning_effort\b", template):
        variables["reasoning_effort"] = effort
    if effort == "none" and re.search(r"\benable_thinking\b", template):
        variables["enable_thinking"] = False
    return variables


async def _grammar(
    state: ServerState, body: ChatRequest, tools: ToolUse, tokenizer: Tokenizer
) -> Grammar | None:
    named = requested_grammar(body)
    if named is not None and tools.shown:
        if named[1].kind != "json_schema":
            raise BadField(
                named[0],
                f"{named[0]} and tools cannot go together: the output would not be a call",
                "Leave one out, or set tool_choice to 'none'",
            )
        # A forced tool call leaves no text that response_format could constrain.
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
    """A grammar of tool calls, or of an answer in the JSON schema of `answer`."""
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


async def _check_tools(state: ServerState, body: ChatRequest) -> None:
    """Raise BadField for the first tool whose JSON schema cannot be compiled to a grammar."""
    for i, tool in enumerate(body.tools or []):
        if _is_constrained(tool, body):
            await _check_parameters(state, i, tool)


def _is_constrained(tool: Tool, body: ChatRequest) -> bool:
    """Whether calls of `tool` are constrained to its JSON schema."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return tool.function.name == choice.function.name
    return choice == "required" or bool(tool.function.strict) or body.response_format is not None


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
    state: ServerState, body: ChatRequest, grammar: Grammar | None, fixed: Mapping[str, Any]
) -> Output:
    both = (body.max_completion_tokens, body.max_tokens)
    if None not in both and both[0] != both[1]:
        raise BadField(
            "max_tokens",
            f"max_completion_tokens is {both[0]} and max_tokens is {both[1]}",
            "Give one of them",
        )
    if body.top_logprobs and not body.logprobs:
        raise BadField(
            "top_logprobs",
            f"top_logprobs is {body.top_logprobs}, but logprobs are not body for",
            "Set logprobs to true",
        )
    within("top_logprobs", body.top_logprobs or 0, state.options.max_logprobs)
    return Output(
        max_tokens=both[1] if both[0] is None else both[0],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
        fixed=fixed,
    )


routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
