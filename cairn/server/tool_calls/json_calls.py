"""Parses tool calls in JSON, including common deviations from the format."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

SPACE = " \t\r\n"
SEPARATORS = SPACE + ",;"
"""Characters between consecutive calls."""
NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
_WRAPPER_KEYS = {"function", "type", "id", "index"}
_BEGUN_CALL = re.compile(
    r'\{\s*"(?:name|function)"\s*:\s*("(?:[^"\\]|\\.)*")\s*'
    r'(?:,\s*"(?:arguments|parameters)"\s*:\s*|,?[^{]*$)'
)
"""A call from its name up to its arguments, possibly truncated."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call: the function's name, and its arguments, the text of a JSON object."""

    name: str
    arguments: str


def read_calls(text: str, tools: Collection[str] | None) -> list[Call] | None:
    """Parse a text that consists of one or more calls; None if it does not.

    A call is `{"name": ..., "arguments": {...}}`. Also accepted: `parameters` for `arguments`,
    `function` for `name`, OpenAI's `{"function": {...}}` around it, the arguments or the whole call
    as a JSON string, and several calls in a list or in sequence. An object without arguments but
    with other keys is not a call, because these keys may be its arguments.

    Args:
        text: the text between the markers of a call.
        tools: names of functions that may be called, None for any.
    """
    try:
        calls = [_read_call(found) for found in _objects(text)]
    except (ValueError, RecursionError):
        return None
    if tools is not None and any(call.name not in tools for call in calls):
        return None
    return calls or None


def read_unclosed_calls(text: str, tools: Collection[str] | None) -> list[Call] | None:
    """`read_calls` of a text that may lack its last closing brackets, which some models leave
    out."""
    texts = (text + closing for closing in ("", "]", "}", "}]"))
    return next((calls for each in texts if (calls := read_calls(each, tools))), None)


_BEGUN_ARGUMENTS = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*("(?:[^"\\]|\\.)*")\s*'
    r',\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*")'
)
"""A call up to its non-empty arguments."""


def begun_arguments(text: str, begin: int) -> tuple[str, int] | None:
    """The function's name and the offset of the arguments of the call at `begin` in `text`.

    None if the arguments have not begun, or the call has another format.
    """
    begun = _BEGUN_ARGUMENTS.match(text, begin)
    if begun is None:
        return None
    try:
        name = json.loads(begun[1])
        name.encode()
    except ValueError:
        return None
    return name, begun.end()


def begun_call(text: str) -> Call | None:
    """The truncated call at the beginning of a text, with the arguments so far.

    None if its name is not complete.
    """
    begun = _BEGUN_CALL.search(text)
    if begun is None:
        return None
    arguments = text[begun.end() :]
    with contextlib.suppress(ValueError, RecursionError):
        # The arguments may be complete and only the call's closing brace missing.
        arguments = arguments[: _DECODER.raw_decode(arguments)[1]]
    return Call(json.loads(begun[1]), arguments)


def _objects(text: str, inside: bool = False) -> Iterator[str]:
    """Yield the texts of consecutive objects; `inside`: also those in a list or a JSON string."""
    at = _skip(text, 0)
    while at < len(text):
        value, end = _DECODER.raw_decode(text, at)
        if isinstance(value, dict):
            yield text[at:end]
        elif inside:
            raise ValueError("no object")
        elif isinstance(value, list):
            yield from _objects(text[at + 1 : end - 1], inside=True)
        elif isinstance(value, str):
            yield from _objects(value, inside=True)
        else:
            raise ValueError("no object")
        at = _skip(text, end, SEPARATORS)


def _read_call(text: str) -> Call:
    """Parse an object as a call. Raises ValueError if it is not one."""
    members = _members(text)
    wrapped = members.get("function")
    if wrapped is not None and isinstance(wrapped[0], dict):
        if members.keys() - _WRAPPER_KEYS:
            raise ValueError("no call")
        members = _members(wrapped[1])
    names = [members[key][0] for key in NAME_KEYS if key in members]
    if not names or not isinstance(names[0], str) or names[0] != names[-1]:
        raise ValueError("no name")
    given = [_arguments(*members[key]) for key in ARGUMENT_KEYS if key in members]
    written = {json.dumps(value): text for value, text in filter(None, given)}
    filled = [text for value, text in written.items() if value != "{}"]
    if len(filled) > 1:
        raise ValueError("arguments of two kinds")
    if not written and not _bare(members):
        raise ValueError("the arguments may stand under an unknown key")
    return Call(names[0], filled[0] if filled else "{}")


def _arguments(value: Any, text: str) -> tuple[dict[str, Any], str] | None:
    """The arguments and their text; None if they are null or an empty string."""
    if isinstance(value, str):
        text = value
        # Raises for an unpaired surrogate, which cannot be encoded as UTF-8.
        text.encode()
        value = _DECODER.decode(text) if text.strip(SPACE) else None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value, text


def _bare(members: dict[str, tuple[Any, str]]) -> bool:
    """Whether a call without arguments has no other members that could be its arguments."""
    known = {*NAME_KEYS, *ARGUMENT_KEYS}
    return all(
        key in known or (key, value[0]) == ("type", "function") for key, value in members.items()
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object: name -> (value, the value as written)."""
    members = {}
    # The text is a complete JSON object, so indices stay within it.
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        value, end = _DECODER.raw_decode(text, begin)
        members[key] = value, text[begin:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _skip(text: str, at: int, signs: str = SPACE) -> int:
    while at < len(text) and text[at] in signs:
        at += 1
    return at
