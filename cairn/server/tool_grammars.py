"""Grammars of answers that call tools, or may call them, and whose calls follow their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engine.grammar import json_rule
from cairn.engine.schema import prepared
from cairn.errors import BadRequest
from cairn.server.tool_calls.forms import FORMS, JSON, Form
from cairn.server.tool_calls.separate import quoted, separate_arguments
from cairn.types import Grammar

HERMES, LLAMA3_JSON = "hermes", "llama3_json"
ANY_OBJECT = {"type": "object"}

TEXT_RULE = r"TEXT: /(.|\n)*/"
# A lazy rule ends where it first matches: from there on nothing but a call can follow.
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
    """A grammar that makes an output a call.

    Args:
        tools: as in a request: `{"type": "function", "function": {"name", "parameters"}}`.
        choice: "required", or the name of the function that is to be called; "none" and "auto"
            ask for nothing.
        parser: name of a form, which the call takes.
        several: with "required", more calls may follow the first. The model must be able to end
            its output then.
        answer: a JSON schema (a parsed one) that the output may follow instead.
        special: special tokens of the tokenizer, name -> id; the form's markers may be some.

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
    """A grammar for tool_choice "auto": any text, in which what the parser takes for the beginning
    of a call goes on as a call of one of the tools.

    Args:
        tools: as in a request, with `strict` where arguments must follow their schema; those of
            the others are any object.
        parser: name of the form that calls take.
        special: as in `tool_grammar`.

    Returns:
        None for a form without an opening marker at which a grammar could begin: `strict` has no
        effect then.
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


def _arguments(form: Form, i: int, schema: Mapping[str, Any]) -> list[str]:
    """The rules of a function's arguments, as the form writes them."""
    if form.arguments == JSON:
        return [f"arguments_{i}: {json_rule(schema)}"]
    return separate_arguments(form, i, prepared(schema))


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever it says."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {**parameters, "type": "object"}


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call in Llama 3's form as a JSON schema. Beside an answer in JSON the grammar's lexer could
    not separate literals of a call from the answer's."""
    arguments = prepared(arguments_schema(function))
    # References in it are meant from its own root.
    arguments.setdefault("$id", "urn:arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


class _Writer:
    """Writes texts as literals of a grammar; special tokens in them by their ids.

    Args:
        special: name -> id.
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
        """Whether no special token is in it."""
        return self._pattern.search(text) is None
