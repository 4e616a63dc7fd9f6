"""Converts argument values that a model writes as plain text to JSON."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 16
"""Maximum depth of nested references in a schema."""
PLAIN = frozenset({"string"})
KIND_OF = {
    bool: "boolean", dict: "object", float: "number", int: "integer", list: "array", str: "string",
    type(None): "null",
}  # fmt: skip


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str] | None:
    """The JSON types that a schema allows for a property; None if it allows any."""
    properties = schema.get("properties")
    inner = properties.get(key) if isinstance(properties, Mapping) else None
    found = frozenset(_kinds(inner, schema, 0))
    return None if not found or "" in found else found


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the types that a schema allows; "" stands for any."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        yield ""
        return
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield from _kinds(_followed(reference, root), root, depth + 1)
    elif "type" in schema:
        given = schema["type"]
        yield from (str(kind) for kind in (given if isinstance(given, list) else [given]))
    elif "const" in schema or "enum" in schema:
        values = schema.get("enum") if "enum" in schema else [schema["const"]]
        yield from (KIND_OF.get(type(value), "") for value in values or ())
    else:
        branches = [b for name in ("anyOf", "oneOf", "allOf") for b in schema.get(name) or ()]
        for branch in branches or [None]:
            yield from _kinds(branch, root, depth + 1)


def _followed(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def json_value(text: str, kinds: frozenset[str] | None) -> str:
    """Convert a value to JSON text.

    If `text` is JSON or a Python literal of an allowed type, the result is that value, else `text`
    as a string.
    """
    value = _parsed(text.strip())
    if value is not None and (kinds is None or _fits(value[0], kinds)):
        # Keep the digits of a number.
        return value[1]
    return json.dumps(text, ensure_ascii=False)


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    kind = KIND_OF.get(type(value), "")
    if kind in kinds or (kind == "integer" and "number" in kinds):
        return True
    # No allowed type matches. If strings are not allowed either, keep the parsed value.
    return "string" not in kinds


def _parsed(text: str) -> tuple[Any, str] | None:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_no_constant), text
    with contextlib.suppress(ValueError, RecursionError, SyntaxError, TypeError, MemoryError):
        value = ast.literal_eval(text)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
