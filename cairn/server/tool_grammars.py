"""The grammar of an answer that may call tools or not, whose calls follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engine.grammar import json_rule
from cairn.server.tools import CLOSE_TAG, HERMES, OPEN_TAG, arguments_schema, quoted
from cairn.types import Grammar

ANY_OBJECT = {"type": "object"}

# A lazy rule ends where it first matches: from there on nothing but a call can follow.
HERMES_RULES = rf"""start: (open call {quoted(CLOSE_TAG)})* TEXT
open[lazy]: TEXT {quoted(OPEN_TAG)}
TEXT: /(.|\n)*/"""
LLAMA3_RULES = r"""start: first ("; {\"name\"" named)* | TEXT
first: by_name named | by_type ": \"function\", \"name\"" named | by_arguments ": " reversed
by_name[lazy]: BEFORE /"(name|function)"/
by_type[lazy]: BEFORE "\"type\""
by_arguments[lazy]: BEFORE /"(parameters|arguments)"/
BEFORE: /[ \t\r\n]*(<\|python_tag\|>[ \t\r\n]*)?\{[ \t\r\n]*/
TEXT: /(.|\n)*/"""


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
            head, tail = quoted(f'\n{{"name": {name}, "arguments": '), quoted("}\n")
            lines.append(f"call_{i}: {head} arguments_{i} {tail}")
        else:
            head, tail = quoted(f': {name}, "parameters": '), quoted(f', "name": {name}}}')
            lines.append(f"named_{i}: {head} arguments_{i} {quoted('}')}")
            lines.append(f"reversed_{i}: arguments_{i} {tail}")
        schema = arguments_schema(function) if function.get("strict") else ANY_OBJECT
        lines.append(f"arguments_{i}: {json_rule(schema)}")
    return Grammar("ebnf", "\n".join(lines))
