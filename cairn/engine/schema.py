"""Rewrites JSON schemas to a form that llguidance enforces exactly.

llguidance keeps numbers as 64-bit floats, refuses formats that it does not know, and takes a
`oneOf` only where it sees without following references that its branches exclude each other. Here
a schema is rewritten to one of the same meaning that it follows exactly, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from math import isfinite
from typing import Any

from cairn.engine.exclusion import Exclusion
from cairn.engine.keywords import rewrite
from cairn.errors import BadRequest

EXACT = 2**53
"""A 64-bit float holds every integer up to this one."""
INT64_MAX = 2**63 - 1
LONGER_THAN_ANY = 2**31
"""No output has as many characters, items or members; llguidance takes sizes up to 2**32."""
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""Formats that llguidance follows; by the specification others are annotations."""

_ONE = ("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_MOST = ("maxItems", "maxLength", "maxProperties")
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")


def prepared(schema: Any) -> Any:
    """A copy of a parsed schema that llguidance follows exactly.

    Raises:
        BadRequest: it has a number that a 64-bit float does not hold, or a keyword in a form that
            is not followed.
    """
    text = json.dumps(schema)
    schema = json.loads(text)
    parts = list(subschemas(schema))
    for path, part in parts:
        rewrite(path, part)
        _check_values(path, part)
        _prepare_bounds(path, part)
        for key in _MOST:
            if isinstance(most := part.get(key), int | float) and most >= LONGER_THAN_ANY:
                del part[key]
        name = part.get("format")
        if not (isinstance(name, str) and name in FORMATS):
            part.pop("format", None)
    branching = [part for _, part in parts if isinstance(part.get("oneOf"), list)]
    if branching:
        nested_ids = any("$id" in part or "id" in part for path, part in parts if path)
        exclusion = Exclusion(schema, nested_ids, len(text))
        for part in branching:
            _prepare_one_of(part, exclusion)
    return schema


def _prepare_one_of(part: dict[str, Any], exclusion: Exclusion) -> None:
    """Rewrite `oneOf` as `anyOf` where no value satisfies two branches."""
    branches = part.pop("oneOf")
    if not exclusion.all_exclude(branches, part):
        part["oneOf"] = branches
    elif "anyOf" not in part:
        part["anyOf"] = branches
    else:
        part["allOf"] = [*part.get("allOf", []), {"anyOf": branches}]


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that is an object, with its path: the schema itself and those inside it."""
    left = [("", schema)]
    while left:
        path, part = left.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for key in part.keys() & _ALL:
            value, inner = part[key], f"{path}.{key}" if path else key
            if isinstance(value, list) and key in _LIST:
                left += [(f"{inner}[{i}]", item) for i, item in enumerate(value)]
            elif isinstance(value, dict) and key in _NAMED:
                left += [(f"{inner}.{name}", item) for name, item in value.items()]
            elif key in _ONE:
                left.append((inner, value))


_ALL = frozenset((*_ONE, *_LIST, *_NAMED))


def _check_values(path: str, part: dict[str, Any]) -> None:
    """Refuse a constant whose digits would change."""
    left = [(key, part[key]) for key in ("const", "enum") if key in part]
    while left:
        key, value = left.pop()
        if isinstance(value, list):
            left += [(key, item) for item in value]
        elif isinstance(value, dict):
            left += [(key, item) for item in value.values()]
        elif not _keeps_digits(value):
            raise _inexact(path, key, value)


def _keeps_digits(value: Any) -> bool:
    """Whether a constant that is no list or object is written as it is."""
    if isinstance(value, float):
        return isfinite(value)
    return not isinstance(value, int) or abs(value) <= EXACT or _fits_int64(value)


def _prepare_bounds(path: str, part: dict[str, Any]) -> None:
    """Remove bounds that every 64-bit integer satisfies; refuse bounds that would be rounded."""
    types = part.get("type", "number")
    types = types if isinstance(types, list) else [types]
    if not {"number", "integer"}.intersection(t for t in types if isinstance(t, str)):
        return
    whole = "number" not in types and "type" in part
    for key in (*_LOWER, *_UPPER):
        bound = part.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        outward = bound if key in _UPPER else -bound
        if outward >= INT64_MAX and not (whole and key == "maximum" and bound == INT64_MAX):
            del part[key]
        elif outward < INT64_MAX and not _bound_holds(part, key, bound, whole):
            raise _inexact(path, key, bound)


def _bound_holds(part: dict[str, Any], key: str, bound: float, whole: bool) -> bool:
    """Whether llguidance holds a bound exactly; `whole`: the schema allows integers only."""
    exclusive = key.startswith("exclusive") or part.get(f"exclusiveM{key[1:]}") is True
    # Integers: exclusiveMinimum x becomes minimum x + 1, exclusiveMaximum x becomes maximum x - 1.
    away = exclusive and (bound > 0) == (key in _LOWER)
    if abs(bound) <= EXACT - away:
        return True
    if exclusive or not isfinite(bound) or not _fits_int64(int(bound)):
        return False
    # A bound of numbers is written with the shortest digits of its float.
    return whole or Decimal(repr(float(bound))) == int(bound)


def _fits_int64(value: int) -> bool:
    """Whether an integer is the same as a 64-bit float and as a 64-bit integer."""
    return abs(value) <= INT64_MAX and int(float(value)) == value


def _inexact(path: str, key: str, value: float) -> BadRequest:
    where = f"{path}.{key}" if path else key
    return BadRequest(
        f"the JSON schema cannot be used: {where} has the number {value}, which cannot be held "
        "exactly: integers up to 2**53 can",
        "Ids with more digits are better strings",
    )
