"""Error messages for invalid request bodies: the field, its value and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from cairn.errors import BadRequest
from cairn.names import nearest

LONGEST_NAME = 64
LONGEST_VALUE = 100
FEW_FIELDS = 8
"""Maximum number of known fields that the error for an unknown field lists."""

Part = str | int
_PART = re.compile(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)")


class BadField(BadRequest):
    """A request field that cannot be served.

    Args:
        param: path of the field in the body, such as `messages[0].content`.
        message, hint: as in CairnError.
    """

    def __init__(self, param: str | None, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param


def explained(
    error: msgspec.ValidationError, kind: Any, given: Any, within: str = ""
) -> BadRequest:
    """Convert an error of msgspec to one that names the field, its value and the allowed values.

    Args:
        error: error of decoding or converting.
        kind: the expected struct, or a union of structs.
        given: the decoded JSON.
        within: path of `given` in the body; empty for the whole body.
    """
    text, _, where = str(error).partition(" - at ")
    path = re.sub(r"^.*`\$\.?([^`]*)`$", r"\1", where)
    full = joined(within, path)
    if isinstance(error.__cause__, BadField):
        inner = error.__cause__
        return BadField(joined(full, inner.param), inner.message, inner.hint)
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing is not None:
        field = joined(full, missing[1])
        return BadField(field, f"{field} is missing")
    parts = [int(i) if i.isdigit() else i or name for i, name in _PART.findall(path)]
    unknown = re.search(r"unknown field `(.*)`", text, re.DOTALL)
    if unknown is not None:
        field = joined(full, unknown[1])
        hint = _instead(unknown[1], _fields_at(kind, given, parts))
        return BadField(field, f"{field} is not a field of this request", hint)
    about = full or "the body"
    shown = _shown(given, parts)
    if shown is not None:
        about += f" is {shown}"
    if text.startswith("Invalid "):
        choices = ", ".join(map(repr, _choices_at(kind, given, parts)))
        return BadField(full or None, f"{about}: it is none of {choices}" if choices else about)
    return BadField(full or None, f"{about}: {text[0].lower()}{text[1:]}")


def joined(path: str, name: str | None) -> str:
    """The path of the field `name` inside `path`."""
    return ".".join(part for part in (path, name) if part)


def _instead(name: str, fields: Sequence[str]) -> str | None:
    # The search for the nearest name takes seconds for a very long key.
    close = nearest(name, fields) if len(name) <= LONGEST_NAME else None
    if close is not None:
        return f"Did you mean {close!r}?"
    return f"Known there: {', '.join(fields)}" if 0 < len(fields) <= FEW_FIELDS else None


def _shown(given: Any, parts: Sequence[Part]) -> str | None:
    """The value at a path as JSON; None if it is long, or a list or object."""
    for part in parts:
        given = _item(given, part)
    if given is msgspec.UNSET or isinstance(given, list | dict):
        return None
    text = json.dumps(given, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else None


def _fields_at(kind: Any, given: Any, parts: Sequence[Part]) -> list[str]:
    """Field names of the structs at a path."""
    structs = [t for t in _types_at(kind, given, parts) if isinstance(t, inspect.StructType)]
    names = [field.encode_name for struct in structs for field in struct.fields]
    tags = [struct.tag_field for struct in structs if struct.tag_field]
    return list(dict.fromkeys(tags + names))


def _choices_at(kind: Any, given: Any, parts: Sequence[Part]) -> list[Any]:
    """The allowed values at a path, if they are a short list of literals."""
    found: list[Any] = []
    for each in _types_at(kind, given, parts[:-1]):
        if isinstance(each, inspect.StructType) and parts and each.tag_field == parts[-1]:
            found.append(each.tag)
    for each in _types_at(kind, given, parts):
        if isinstance(each, inspect.LiteralType):
            found += each.values
    return list(dict.fromkeys(found))


def _types_at(kind: Any, given: Any, parts: Sequence[Part]) -> list[inspect.Type]:
    """The allowed types at a path of `given`, whose type is `kind`."""
    types = _tagged(list(_plain(inspect.type_info(kind))), given)
    for part in parts:
        inner = [found for each in types for found in _inside(each, part)]
        given = _item(given, part)
        types = _tagged([member for each in inner for member in _plain(each)], given)
    return types


def _tagged(types: list[inspect.Type], given: Any) -> list[inspect.Type]:
    """The struct types whose tag matches `given`; all types if none matches."""
    matching: list[inspect.Type] = [
        each
        for each in types
        if isinstance(each, inspect.StructType)
        and each.tag_field is not None
        and _item(given, each.tag_field) == each.tag
    ]
    return matching or types


def _item(given: Any, part: Part) -> Any:
    """The item or member of `given`; UNSET if it does not exist."""
    try:
        return given[part]
    except (KeyError, IndexError, TypeError):
        return msgspec.UNSET


def _plain(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the members of a union, without their constraints."""
    if isinstance(kind, inspect.Metadata):
        yield from _plain(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _plain(member)
    else:
        yield kind


def _inside(kind: inspect.Type, part: Part) -> Iterator[inspect.Type]:
    """Yield the types of an item or member of `kind`."""
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == part)
    elif isinstance(kind, inspect.ListType):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
