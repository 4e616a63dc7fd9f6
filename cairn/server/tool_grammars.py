"""Grammars that constrain outputs to tool calls, or calls within outputs to their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engine.grammar import json_rule
from cairn.engine.schema import prepared
from cairn.errors import BadRequest
from cairn.server.tool_calls.formats import FORMS, JSON, ToolCallFormat
from cairn.server.tool_calls.parameter_rules import parameter_rules, quoted
from cairn.types import Grammar

HERMES, LLAMA3_JSON = "hermes", "llama3_json"
ANY_OBJECT = {"type": "object"}

TEXT_RULE = r"TEXT: /(.|\n)*/"
# A lazy rule ends at its first match, after which only a call is allowed.
LLAMA3_RULES = r"""start: first ("; {\"name\"" named)* | listed (", {\"name\"" named)* "]" | TEXT
first: by_name named | by_type ": \"function\", \"name\"" named | by_arguments ": " reversed
by_name[lazy]: BEFORE NAME
by_type[lazy]: BEFORE TYPE
by_arguments[lazy]: BEFORE ARGUMENTS
listed: listed_name named | listed_type ": \"function\", \"name\"" named
    | listed_arguments ": " reversed
listed_name[lazy]: BEFORE_LIST NAME
listed_type[lazy]: BEFORE_LIST TYPE
listed_arguments[lazy]: BEFORE_LIST ARGUMENTS
BEFORE: /[ \t\r\n]*(<\|python_tag\|>[ \t\r\n]*)?\{[ \t\r\n]*/
BEFORE_LIST: /[ \t\r\n]*(<\|python_tag\|>[ \t\r\n]*)?\[[ \t\r\n]*\{[ \t\r\n]*/
NAME: /"(name|function)"/
TYPE: "\"type\""
ARGUMENTS: /"(parameters|arguments)"/
TEXT: /(.|\n)*/"""


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parser: str,
    *,
    several: bool = False,
    answer: Any = None,
    special: Mapping[str, int] | None = None,
) -> Grammar | None:
    """A grammar that constrains the output to tool calls.

    Args:
        tools: the tools in OpenAI's format, `{"type": "function", "function": {...}}`.
        choice: "required" or the name of the function to call; "none" and "auto" need no grammar.
        parser: name of the format of calls.
        several: with "required", further calls may follow the first. The model needs an
            end-of-sequence token then.
        answer: parsed JSON schema that the output may follow instead of a call.
        special: the tokenizer's special tokens, name -> id; markers of the format may be among
            them.

    Returns:
        None if `choice` requires no call.

    Raises:
        BadRequest: no tool has the name, or as `json_rule`.
    """
    if choice in ("none", "auto"):
        return None
    functions = [tool["function"] for tool in tools]
    if choice != "required":
        functions = [function for function in functions if function["name"] == choice]
        if not functions:
            raise BadRequest(f"no tool is named {choice!r}", "Choose one of the tools given")
    form = FORMS[parser]
    write = _Writer(special)
    between = f"{write(form.between)} " if form.between else ""
    follow = f" ({between}call)*" if several and choice == "required" else ""
    begin, end = write(form.begin), write(form.end)
    lines = [f"start: {begin} call{follow} {end}", "call: " + _any("call", functions)]
    if answer is not None:
        lines[0] += " | answer"
        lines.append(f"answer: {json_rule(answer)}")
    for i, function in enumerate(functions):
        if answer is not None and parser == LLAMA3_JSON:
            lines.append(f"call_{i}: {json_rule(_call_schema(function))}")
            continue
        name = function["name"]
        head, tail = write(form.head_of(name)), write(form.tail_of(name))
        lines.append(f"call_{i}: {head} arguments_{i} {tail}")
        lines += _arguments(form, i, arguments_schema(function))
    return Grammar("ebnf", "\n".join(lines))


def strict_grammar(
    tools: Sequence[Mapping[str, Any]], parser: str, special: Mapping[str, int] | None = None
) -> Grammar | None:
    """A grammar for tool_choice "auto": any text, in which an opening marker begins a valid call.

    Args:
        tools: the tools in OpenAI's format. Arguments of `strict` tools follow their schema, those
            of others are any object.
        parser: name of the format of calls.
        special: as in `tool_grammar`.

    Returns:
        None for a format without an opening marker, for which `strict` has no effect.
    """
    functions = [tool["function"] for tool in tools]
    schemas = [arguments_schema(f) if f.get("strict") else ANY_OBJECT for f in functions]
    form = FORMS[parser]
    if parser == LLAMA3_JSON:
        return Grammar("ebnf", "\n".join(_llama3_lines(functions, schemas)))
    if not form.opening:
        return None
    write = _Writer(special)
    between = f"{write(form.between)} " if form.between else ""
    calls = "call" if parser == HERMES else f"call ({between}next)*"
    lines = [
        f"start: (open {calls} {write(form.end)})* TEXT",
        f"open[lazy]: TEXT {write(form.opening)}"
        if _Writer(special).is_text(form.opening)
        else f"open: TEXT {write(form.opening)}",
        TEXT_RULE,
        "call: " + _any("call", functions),
    ]
    if parser != HERMES:
        lines.append("next: " + _any("next", functions))
    for i, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
        name = function["name"]
        tail = write(form.tail_of(name))
        opened = (form.begin + form.head_of(name)).removeprefix(form.opening)
        lines.append(f"call_{i}: {write(opened)} arguments_{i} {tail}")
        if parser != HERMES:
            lines.append(f"next_{i}: {write(form.head_of(name))} arguments_{i} {tail}")
        lines += _arguments(form, i, schema)
    return Grammar("ebnf", "\n".join(lines))


def _llama3_lines(
    functions: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]
) -> list[str]:
    lines = [
        LLAMA3_RULES,
        "named: " + _any("named", functions),
        "reversed: " + _any("reversed", functions),
    ]
    for i, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
        name = json.dumps(function["name"])
        head, tail = quoted(f': {name}, "parameters": '), quoted(f', "name": {name}}}')
        lines.append(f"named_{i}: {head} arguments_{i} {quoted('}')}")
        lines.append(f"reversed_{i}: arguments_{i} {tail}")
        lines.append(f"arguments_{i}: {json_rule(schema)}")
    return lines


def _any(rule: str, functions: Sequence[Any]) -> str:
    return " | ".join(f"{rule}_{i}" for i in range(len(functions)))


def _arguments(form: ToolCallFormat, i: int, schema: Mapping[str, Any]) -> list[str]:
    """The rules of a function's arguments in the format's encoding."""
    if form.arguments == JSON:
        return [f"arguments_{i}: {json_rule(schema)}"]
    return parameter_rules(form, i, prepared(schema))


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, restricted to objects."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {**parameters, "type": "object"}


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a call in Llama 3's format.

    A schema instead of literals, because the grammar's lexer could not distinguish literals of a
    call from an answer in JSON.
    """
    arguments = prepared(arguments_schema(function))
    # The base of its relative references.
    arguments.setdefault("$id", "urn:arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


class _Writer:
    """Converts texts to grammar literals, with special tokens as ids.

    Args:
        special: special tokens, name -> id.
    """

    def __init__(self, special: Mapping[str, int] | None) -> None:
        self._special = {name: token for name, token in (special or {}).items() if name}
        names = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def __call__(self, text: str) -> str:
        parts, at = [], 0
        for match in self._pattern.finditer(text):
            parts += [quoted(text[at : match.start()])] if match.start() > at else []
            parts.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        parts += [quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def is_text(self, text: str) -> bool:
        """Whether `text` contains no special token."""
        return self._pattern.search(text) is None
