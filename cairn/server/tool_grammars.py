"""Grammars of answers that call tools, or may call them, and whose calls follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engine.grammar import json_rule
from cairn.engine.schema import prepared
from cairn.errors import BadRequest
from cairn.server.tools import CLOSE_TAG, HERMES, OPEN_TAG
from cairn.types import Grammar

ANY_OBJECT = {"type": "object"}

# A lazy rule ends where it first matches: from there on nothing but a call can follow.
HERMES_RULES = rf"""start: (open call {json.dumps(CLOSE_TAG)})* TEXT
open[lazy]: TEXT {json.dumps(OPEN_TAG)}
TEXT: /(.|\n)*/"""
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
) -> Grammar | None:
    """A grammar that makes an output a call.

    Args:
        tools: as in a request: `{"type": "function", "function": {"name", "parameters"}}`.
        choice: "required", or the name of the function that is to be called; "none" and "auto"
            ask for nothing.
        parser: one of `cairn.server.tools.PARSERS`, whose form the call takes.
        several: with "required", more calls may follow the first. The model must be able to end
            its output then.
        answer: a JSON schema (a parsed one) that the output may follow instead.

    Returns:
        None where no call is asked for.

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
    key, before, after, between = (
        ("arguments", f"{OPEN_TAG}\n", f"\n{CLOSE_TAG}", "\n")
        if parser == HERMES
        else ("parameters", "", "", "; ")
    )
    follow = f" ({_quoted(between)} call)*" if several and choice == "required" else ""
    names = " | ".join(f"call_{i}" for i in range(len(functions)))
    lines = [f"start: call{follow}", f"call: {_quoted(before)} ({names}) {_quoted(after)}"]
    if answer is not None:
        lines[0] += " | answer"
        lines.append(f"answer: {json_rule(answer)}")
    for i, function in enumerate(functions):
        if answer is not None and parser != HERMES:
            lines.append(f"call_{i}: {json_rule(_call_schema(function))}")
            continue
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        lines.append(f"call_{i}: {_quoted(head)} arguments_{i} {_quoted('}')}")
        lines.append(f"arguments_{i}: {json_rule(arguments_schema(function))}")
    return Grammar("ebnf", "\n".join(lines))


def strict_grammar(tools: Sequence[Mapping[str, Any]], parser: str) -> Grammar:
    """A grammar for tool_choice "auto": any text, in which what the parser takes for the beginning
    of a call goes on as a call of one of the tools.

    Args:
        tools: as in a request, with `strict` where arguments must follow their schema; those of
            the others are any object.
        parser: one of `cairn.server.tools.PARSERS`, whose form calls take.
    """
    functions = [tool["function"] for tool in tools]
    numbers = range(len(functions))
    if parser == HERMES:
        lines = [HERMES_RULES, "call: " + " | ".join(f"call_{i}" for i in numbers)]
    else:
        lines = [
            LLAMA3_RULES,
            "named: " + " | ".join(f"named_{i}" for i in numbers),
            "reversed: " + " | ".join(f"reversed_{i}" for i in numbers),
        ]
    for i, function in enumerate(functions):
        name = json.dumps(function["name"])
        if parser == HERMES:
            head, tail = _quoted(f'\n{{"name": {name}, "arguments": '), _quoted("}\n")
            lines.append(f"call_{i}: {head} arguments_{i} {tail}")
        else:
            head, tail = _quoted(f': {name}, "parameters": '), _quoted(f', "name": {name}}}')
            lines.append(f"named_{i}: {head} arguments_{i} {_quoted('}')}")
            lines.append(f"reversed_{i}: arguments_{i} {tail}")
        schema = arguments_schema(function) if function.get("strict") else ANY_OBJECT
        lines.append(f"arguments_{i}: {json_rule(schema)}")
    return Grammar("ebnf", "\n".join(lines))


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever it says."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {**parameters, "type": "object"}


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call in Llama 3's form as a JSON schema: beside an answer in JSON, whose signs its lexer
    would not tell from those of a call that is written in literals."""
    arguments = prepared(arguments_schema(function))
    # References in it are meant from its own root.
    arguments.setdefault("$id", "urn:arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _quoted(text: str) -> str:
    """A literal of Lark, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
