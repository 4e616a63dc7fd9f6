"""Grammar rules for formats that write each parameter separately."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cairn.engine.grammar import json_rule
from cairn.server.tool_calls.formats import KEYWORDS, ToolCallFormat
from cairn.server.tool_calls.values import PLAIN, kinds_of

PARAMETER = {
    "qwen3_coder": ("<parameter={}>\n", "\n</parameter>\n"),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4"),
        ('<｜DSML｜parameter name="{}" string="{?}">', "</｜DSML｜parameter>\n"),
    ),
}
"""Markup before and after a value; `{?}` is replaced by whether the value is plain text."""


def quoted(text: str) -> str:
    """A literal of Lark, which has JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)


def parameter_rules(form: ToolCallFormat, i: int, schema: Mapping[str, Any]) -> list[str]:
    """The rules of the i-th function's arguments.

    Properties are in the order of the schema, each at most once, required ones always. A string
    follows an `enum` but no other keyword; other values follow their schema. Properties that the
    schema does not name are not allowed.
    """
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = [name for name in schema.get("required") or () if name in properties]
    lines, parts = [], []
    for j, (name, inner) in enumerate(properties.items()):
        rule = f"argument_{i}_{j}"
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        plain = form.arguments != KEYWORDS and kinds_of(schema, name) == PLAIN
        lines += _value(form, rule, name, inner, shared, plain)
        parts.append((rule, name in required))
    if form.arguments == KEYWORDS:
        lines += _listed(f"arguments_{i}", [rule for rule, _ in parts], [must for _, must in parts])
        return lines
    joined = " ".join(rule if must else f"{rule}?" for rule, must in parts)
    return [*lines, f"arguments_{i}: {joined or _EMPTY}"]


_EMPTY = '""'


def _value(
    form: ToolCallFormat, rule: str, name: str, inner: Any, shared: Mapping[str, Any], plain: bool
) -> list[str]:
    if form.arguments == KEYWORDS:
        return [f"{rule}: {quoted(name + '=')} {rule}_value", _json(rule, inner, shared)]
    before, behind = PARAMETER[form.name]
    before = before.replace("{?}", "true" if plain else "false").replace("{}", name)
    choices = inner.get("enum") if isinstance(inner, Mapping) else None
    if isinstance(inner, Mapping) and isinstance(inner.get("const"), str):
        choices = [inner["const"]]
    if not plain:
        value, more = f"{rule}_value {quoted(behind)}", [_json(rule, inner, shared)]
    elif isinstance(choices, list):
        texts = " | ".join(quoted(str(choice)) for choice in choices)
        value, more = f"({texts}) {quoted(behind)}", []
    else:
        value, more = f"{rule}_text", [f"{rule}_text[lazy]: /(.|\\n)*/ {quoted(behind)}"]
    return [f"{rule}: {quoted(before)} {value}", *more]


def _json(rule: str, inner: Any, shared: Mapping[str, Any]) -> str:
    schema = {**inner, **shared} if isinstance(inner, Mapping) else inner
    return f"{rule}_value: {json_rule(schema)}"


def _listed(rule: str, names: list[str], must: list[bool]) -> list[str]:
    """Rules of a comma-separated list whose optional items may be missing.

    `rule` matches the whole list; `rule_k` matches items k, k + 1, ... after an earlier item.
    """
    lines = []
    for k in range(len(names) + 1):
        for begun in (False, True):
            left = f"{rule}_{k}" if begun else (rule if k == 0 else f"{rule}_{k}_first")
            if k == len(names):
                lines.append(f'{left}: ""')
                continue
            comma = '", " ' if begun else ""
            options = [f"{comma}{names[k]} {rule}_{k + 1}"]
            if not must[k]:
                options.append(f"{rule}_{k + 1}" if begun else f"{rule}_{k + 1}_first")
            lines.append(f"{left}: {' | '.join(options)}")
    return lines
