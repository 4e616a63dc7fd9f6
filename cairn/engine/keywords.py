"""Keywords of JSON schemas that llguidance does not know, written with those that it knows.

`not` and `propertyNames` keep their meaning, or are refused. `uniqueItems` is approximated: it is
left out, so that items may repeat.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from cairn.errors import BadRequest

log = logging.getLogger(__name__)

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def rewrite(path: str, part: dict[str, Any]) -> None:
    """Rewrite the keywords of one schema, in place.

    Args:
        path: of the schema, for errors.
        part: the schema.

    Raises:
        BadRequest: a `not` or `propertyNames` that has no such form.
    """
    if part.pop("uniqueItems", False) is True:
        _warn_of_repeated_items()
    if "propertyNames" in part:
        _write_names(path, part)
    if "not" in part:
        _write_not(path, part)


@cache
def _warn_of_repeated_items() -> None:
    log.warning("uniqueItems of JSON schemas is not enforced: items may repeat")


def _write_names(path: str, part: dict[str, Any]) -> None:
    """Rewrite `propertyNames` by the properties that it allows."""
    names = part.pop("propertyNames")
    if names is True or names == {} or names == {"type": "string"}:
        return
    known = isinstance(names, Mapping) and names.keys() <= {"type", "pattern", "enum", "const"}
    kinds = [key for key in ("pattern", "enum", "const") if known and key in names]
    if len(kinds) != 1 or names.get("type", "string") != "string":
        raise _refused(path, "propertyNames", "with one of pattern, enum and const")
    value = part.get("additionalProperties", {})
    properties = dict(part.get("properties", {}))
    if kinds == ["pattern"]:
        pattern = _compiled(path, names["pattern"])
        part["properties"] = {
            name: inner if pattern.search(name) else False for name, inner in properties.items()
        }
        patterns = part.get("patternProperties", {})
        if patterns:
            raise _refused(path, "propertyNames", "with a pattern, without patternProperties")
        part["patternProperties"] = {names["pattern"]: value}
    else:
        allowed = names["enum"] if "enum" in names else [names["const"]]
        if part.get("patternProperties"):
            raise _refused(path, "propertyNames", "with names, without patternProperties")
        part["properties"] = {
            name: properties.get(name, value) for name in allowed if isinstance(name, str)
        }
    part["additionalProperties"] = False


def _compiled(path: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError):
        raise _refused(path, "propertyNames", "with a valid pattern") from None


def _write_not(path: str, part: dict[str, Any]) -> None:
    """Rewrite `not` by its complement: other types, other values, or absent properties."""
    denied = part.pop("not")
    if denied is False:
        return
    left = None
    if isinstance(denied, Mapping):
        for form in (_other_types, _other_values, _absent):
            left = form(denied, part) if left is None else left
    if left is None:
        raise _refused(
            path, "not", "of a type, of a value where an enum lists them, or of one required name"
        )
    part |= left


def _other_types(denied: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any] | None:
    if denied.keys() != {"type"}:
        return None
    given = denied["type"]
    out = set(given if isinstance(given, list) else [given])
    own = part.get("type", list(TYPES))
    own = own if isinstance(own, list) else [own]
    if "number" in out:
        out.add("integer")
    elif "integer" in out and "number" in own:
        # No keyword describes numbers that are not integers.
        return None
    return {"type": [kind for kind in own if kind not in out]}


def _other_values(denied: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any] | None:
    if denied.keys() not in ({"const"}, {"enum"}) or not isinstance(part.get("enum"), list):
        return None
    out = denied["enum"] if "enum" in denied else [denied["const"]]
    # True equals 1 in Python.
    found = [(type(value), value) for value in out]
    return {"enum": [value for value in part["enum"] if (type(value), value) not in found]}


def _absent(denied: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any] | None:
    names = denied.get("required")
    if denied.keys() != {"required"} or not isinstance(names, list) or len(names) != 1:
        return None
    if part.get("type") != "object":
        return None
    return {"properties": {**part.get("properties", {}), names[0]: False}}


def _refused(path: str, key: str, forms: str) -> BadRequest:
    where = f"{path}.{key}" if path else key
    return BadRequest(
        f"the JSON schema cannot be used: {where} has a form that is not followed",
        f"Write it {forms}",
    )
