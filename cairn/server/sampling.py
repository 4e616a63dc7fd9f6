"""Converts a request's sampling fields to SamplingParams and enforces the server's limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cairn.errors import BadRequest
from cairn.server.options import ServerOptions
from cairn.server.protocol.common import (
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StreamOptions,
)
from cairn.server.protocol.explain import BadField
from cairn.types import Grammar, KvTransferParams, SamplingParams

SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Fields with the same name and meaning in a request and in SamplingParams."""


@dataclass(frozen=True, slots=True)
class Output:
    """Output options whose request fields differ between endpoints.

    Attributes:
        max_tokens: as in SamplingParams; None for as many as fit the context.
        logprobs, prompt_logprobs: as in SamplingParams.
        grammar: constraint on the output.
        fixed: values of further parameters, which override the request's.
    """

    max_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)


def sampling_params(
    request: SamplingFields,
    output: Output,
    options: ServerOptions,
    defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        request: its fields.
        output: output options from fields of the endpoint.
        options: options of the server, with its limits.
        defaults: values of fields that the request leaves out.

    Raises:
        BadRequest: a value that is out of range, contradicts another one or exceeds a limit of the
            server; `param` names the field.
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    within("stop", len(stop), options.max_stop, "strings")
    within("n", request.n or 1, options.max_n)
    within("logprobs", output.logprobs or 0, options.max_logprobs)
    prompt_logprobs = _prompt_logprobs(request, output, options)
    selection = request.cairn is not None and request.cairn.selection
    if selection:
        _check_selection(output.max_tokens, options)
    given = {name: getattr(request, name) for name in SAME_NAME}
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(
            stop=tuple(stop),
            max_tokens=output.max_tokens,
            logprobs=output.logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=output.grammar,
            selection=selection,
            **{**(defaults or {}), **chosen, **output.fixed},
        )
    except BadRequest as error:
        error.param = field_named_in(error, type(request))
        raise


def requested_grammar(request: SamplingFields) -> tuple[str, Grammar] | None:
    """The grammar that the request gives for its output, with the name of its field.

    Raises BadRequest if several fields give one.
    """
    found: dict[str, Grammar] = {}
    form = request.response_format
    if isinstance(form, JsonObjectFormat):
        found["response_format"] = Grammar("json_schema", '{"type": "object"}')
    elif isinstance(form, JsonSchemaFormat):
        schema = msgspec.json.encode(form.json_schema.schema).decode()
        found["response_format"] = Grammar("json_schema", schema)
    if request.regex is not None:
        found["regex"] = Grammar("regex", request.regex)
    if request.ebnf is not None:
        found["ebnf"] = Grammar("ebnf", request.ebnf)
    found |= _vllm_grammars(request)
    if request.bad_words:
        found["bad_words"] = Grammar("ebnf", _without(request.bad_words))
    if len(found) > 1:
        names = " and ".join(found)
        raise BadField(list(found)[1], f"{names} both say what the output looks like", "Give one")
    return next(iter(found.items()), None)


def requested_transfer(request: SamplingFields, prompts: int) -> KvTransferParams | None:
    """The parameters of disaggregated prefill in the request.

    Raises BadRequest with several prompts, and for a prefill request that streams.
    """
    asked, name = request.kv_transfer_params, "kv_transfer_params"
    if asked is not None and prompts > 1:
        raise BadField(name, f"{name} stand for one prompt, but there are {prompts}", "Send one")
    if asked is not None and asked.do_remote_decode and request.stream:
        raise BadField(
            name, f"{name} ask for do_remote_decode, but the answer is a stream", "Leave stream out"
        )
    return asked


def _vllm_grammars(request: SamplingFields) -> dict[str, Grammar]:
    """The grammars in vLLM's fields, by field name."""
    fields = {
        "guided_json": ("json", request.guided_json),
        "guided_regex": ("regex", request.guided_regex),
        "guided_choice": ("choice", request.guided_choice),
        "guided_grammar": ("grammar", request.guided_grammar),
    }
    given = [(name, *pair) for name, pair in fields.items() if pair[1] is not None]
    outputs = request.structured_outputs
    if outputs is not None:
        for kind in ("json", "regex", "choice", "grammar", "json_object"):
            value = getattr(outputs, kind)
            if value is not None and value is not False:
                given.append((f"structured_outputs.{kind}", kind, value))
    return {name: _grammar_of(kind, value) for name, kind, value in given}


def _grammar_of(kind: str, value: Any) -> Grammar:
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "json":
        text = value if isinstance(value, str) else json.dumps(value)
        return Grammar("json_schema", text)
    if kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        return Grammar("ebnf", f"start: {texts}")
    return Grammar("regex" if kind == "regex" else "ebnf", value)


def _without(words: Sequence[str]) -> str:
    """A grammar of all texts that contain none of `words`."""
    bad = "|".join(re.sub(r"[^0-9A-Za-z]", _escaped, word) for word in words)
    return rf"start: TEXT{chr(10)}TEXT: /(.|\n)*/ & ~/(.|\n)*({bad})(.|\n)*/"


def _escaped(sign: re.Match[str]) -> str:
    return rf"\x{{{ord(sign[0]):x}}}"


def _prompt_logprobs(request: SamplingFields, output: Output, options: ServerOptions) -> int | None:
    """Number of alternatives to report per prompt token, None for no report."""
    asked = request.prompt_logprobs
    within("prompt_logprobs", asked or 0, options.max_logprobs)
    if asked is not None and request.stream:
        raise BadField(
            "prompt_logprobs", "prompt_logprobs come in whole answers only", "Set stream to false"
        )
    counts = [count for count in (asked, output.prompt_logprobs) if count is not None]
    return max(counts, default=None)


def truncated(ids: Sequence[int], request: SamplingFields, longest: int) -> Sequence[int]:
    """The last `truncate_prompt_tokens` tokens of a prompt.

    Raises BadField for a length of 0.
    """
    size = request.truncate_prompt_tokens
    if size is None:
        return ids
    if size == 0:
        raise BadField("truncate_prompt_tokens", "truncate_prompt_tokens is 0: nothing would stay")
    return ids[-(longest if size < 0 else size) :]


def stream_options(request: SamplingFields) -> StreamOptions | None:
    """The request's stream options, None if it does not stream."""
    return (request.stream_options or StreamOptions()) if request.stream else None


def field_named_in(error: BadRequest, kind: type[msgspec.Struct]) -> str | None:
    """The field of `kind` that the text of an error begins with, or None."""
    if error.message.startswith("selection "):
        return "cairn.selection"
    path = re.match(r"(\w+)[\w.\[\]]*", error.message)
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    return path[0] if path and path[1] in names else None


def within(name: str, value: int, limit: int, unit: str = "") -> None:
    """Raise BadField if `value` exceeds a limit of the server."""
    if value > limit:
        counted = f"{value} {unit}".rstrip()
        raise BadField(name, f"{name} is {counted}, but this server allows {limit}")


def _check_selection(max_tokens: int | None, options: ServerOptions) -> None:
    limit = options.max_selection_tokens
    if max_tokens is None or max_tokens > limit:
        given = "left out" if max_tokens is None else str(max_tokens)
        raise BadField(
            "cairn.selection",
            f"cairn.selection reports outputs of at most {limit} tokens, but max_tokens is {given}",
            f"Set max_tokens to {limit} or less",
        )
