"""Tool calls: found in what a model writes, and asked for by a grammar.

A call is told when it is whole: a known form, a name, and arguments that are a JSON object. What
looks like a call and is none stays text, to the last character. White space beside a call belongs
to its markup.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.engine.grammar import json_rule
from cairn.errors import BadRequest
from cairn.types import Grammar

HERMES = "hermes"
LLAMA3_JSON = "llama3_json"
PARSERS = (HERMES, LLAMA3_JSON)

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. `index` counts the calls of one answer, `id` names it for its result."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; the fragments joined are a JSON object, as the model wrote it."""

    index: int
    fragment: str


Piece = Text | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: str


def choose_parser(name: str, chat_template: str | None) -> str:
    """The parser for a model's calls.

    Args:
        name: one of `PARSERS`, or "auto": by the chat template.
        chat_template: of the model, None when it has none: conversations get a plain form.

    Raises:
        BadRequest: it has no place for tools, or shows no format that is known.
    """
    if chat_template is None:
        # The plain form of conversations writes calls as Hermes models do.
        return HERMES if name == "auto" else name
    if name != "auto":
        return name
    if OPEN_TAG in chat_template:
        return HERMES
    if PYTHON_TAG in chat_template or (
        "ipython" in chat_template and '"parameters"' in chat_template
    ):
        return LLAMA3_JSON
    if not re.search(r"\btools\b", chat_template):
        raise BadRequest(
            "tools were given, but the model's chat template has no place for them",
            "Leave tools out, or serve a model whose template shows tools",
        )
    raise BadRequest(
        "tools were given, but the model's chat template shows no format of tool calls",
        f"Leave tools out, or start the server with --tool-parser ({' or '.join(PARSERS)})",
    )


class ToolParser:
    """Finds the calls in one answer while it is written.

    However the text is split, the pieces joined are the same.

    Args:
        name: one of `PARSERS`.
        tools: names that may be called; None: any. A call of another one is text.
        new_id: gives the calls their ids.
    """

    def __init__(
        self,
        name: str,
        tools: Collection[str] | None = None,
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        self._reader: _Reader = _Hermes(tools) if name == HERMES else _Llama3(tools)
        self._new_id = new_id
        self._calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Take more text; returns what is settled by now."""
        return self._told(self._reader.feed(text))

    def close(self) -> list[Piece]:
        """The rest, when no text follows."""
        return self._told(self._reader.close())

    def cut(self) -> list[Piece]:
        """The rest of an output that is calls alone and was cut off: a call with the arguments that
        were written, or nothing when not even its name was."""
        closed = self.close()
        rest = "".join(piece.text for piece in closed if isinstance(piece, Text))
        pieces: list[Piece] = [piece for piece in closed if not isinstance(piece, Text)]
        begun = _BEGUN_CALL.search(rest)
        if begun is not None:
            arguments = rest[begun.end() :]
            with contextlib.suppress(ValueError, RecursionError):
                # They may be whole, and only what closes the call is missing.
                arguments = arguments[: _DECODER.raw_decode(arguments)[1]]
            pieces.append(CallBegin(self._calls, self._new_id(), json.loads(begun[1])))
            pieces.append(CallArguments(self._calls, arguments))
            self._calls += 1
        return pieces

    def _told(self, found: Iterator[str | _Call]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in found:
            if isinstance(part, _Call):
                pieces.append(CallBegin(self._calls, self._new_id(), part.name))
                pieces.append(CallArguments(self._calls, part.arguments))
                self._calls += 1
            elif part:
                pieces.append(Text(part))
        return pieces


class _Reader(ABC):
    """Splits a growing text into text and calls; `_held` is what may still become a call."""

    def __init__(self, tools: Collection[str] | None) -> None:
        self._tools = tools
        self._held = ""
        self._object: _ObjectEnd | None = None
        """The call that `_held` begins with, while it is open."""
        self._called = False
        """A call was the last that was told: white space behind it is not shown."""

    @abstractmethod
    def feed(self, text: str) -> Iterator[str | _Call]:
        """Take more text."""

    @abstractmethod
    def close(self) -> Iterator[str | _Call]:
        """The rest of the text."""

    def _text(self, text: str) -> str:
        """Text to show; after a call without the space that sets it off."""
        if self._called:
            text = text.lstrip(SPACE)
            self._called = not text
        return text


class _Hermes(_Reader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and several times."""

    def feed(self, text: str) -> Iterator[str | _Call]:
        self._held += text
        while True:
            if self._object is None:
                start = self._held.find(OPEN_TAG)
                if start < 0:
                    yield self._settled(len(self._held) - _overlap(self._held, OPEN_TAG))
                    return
                yield self._settled(start)
                self._object = _ObjectEnd(CLOSE_TAG)
            begin = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            end = self._object.find(self._held, begin)
            if end is None:
                return
            yield from self._decide(begin, end)

    def close(self) -> Iterator[str | _Call]:
        while self._object is not None:
            # A tag that was never closed is text; a call may stand in what follows it.
            yield from self._reject()
            yield from self.feed("")
        yield self._text(self._held)
        self._held = ""

    def _decide(self, begin: int, end: int) -> Iterator[str | _Call]:
        call = _read_call(self._held[begin:end], ("name",), ("arguments",), self._tools)
        if call is None:
            yield from self._reject()
            return
        yield call
        self._called = True
        self._object = None
        self._held = self._held[end + len(CLOSE_TAG) :]

    def _reject(self) -> Iterator[str]:
        size = self._held.index(OPEN_TAG) + len(OPEN_TAG)
        self._object = None
        yield self._text(self._held[:size])
        self._held = self._held[size:]

    def _settled(self, size: int) -> str:
        """The first `size` characters as text, but for the space at their end: a call may follow,
        and then it is not shown."""
        shown = self._held[:size].rstrip(SPACE)
        self._held = self._held[len(shown) :]
        return self._text(shown)


class _Llama3(_Reader):
    """An answer that is nothing but `{"name": ..., "parameters": {...}}`, or several of these
    with `;` between them, maybe behind `<|python_tag|>`."""

    _NAMES = ("name", "function")
    _ARGUMENTS = ("parameters", "arguments")
    _KEYS = (*_NAMES, *_ARGUMENTS, "type")
    _FIRST_KEY = re.compile(r'\{[ \t\r\n]*(?:"([^"]*)("?))?')

    def __init__(self, tools: Collection[str] | None) -> None:
        super().__init__(tools)
        self._plain = False
        self._start = 0

    def feed(self, text: str) -> Iterator[str | _Call]:
        self._held += text
        while not self._plain:
            if self._object is None:
                start = self._find_start()
                if start is None:
                    return
                if start < 0:
                    break
                self._start = start
                self._object = _ObjectEnd()
            if self._is_other():
                break
            end = self._object.find(self._held, self._start)
            if end is None:
                return
            call = _read_call(
                self._held[self._start : end], self._NAMES, self._ARGUMENTS, self._tools
            )
            if call is None:
                break
            yield call
            self._called = True
            self._object = None
            self._held = self._held[end:]
        yield from self._give_up()

    def close(self) -> Iterator[str | _Call]:
        yield from self._give_up()

    def _give_up(self) -> Iterator[str]:
        """All that is left is text."""
        self._plain = True
        held, self._held = self._held, ""
        yield self._text(held)

    def _find_start(self) -> int | None:
        """Where the next call's object begins; -1: there is none, None: not known yet."""
        separators = SPACE + ";" if self._called else SPACE
        text = self._held.lstrip(separators)
        if not self._called and text.startswith(PYTHON_TAG):
            text = text[len(PYTHON_TAG) :].lstrip(SPACE)
        elif not self._called and PYTHON_TAG.startswith(text):
            return None
        if not text:
            return None
        return len(self._held) - len(text) if text[0] == "{" else -1

    def _is_other(self) -> bool:
        """Whether the object's first key, as far as it is there, is none that a call has."""
        match = self._FIRST_KEY.match(self._held, self._start)
        assert match is not None
        if match[1] is None:
            return match.end() < len(self._held)
        if match[2]:
            return match[1] not in self._KEYS
        return not any(key.startswith(match[1]) for key in self._KEYS)


class _ObjectEnd:
    """Looks for where a JSON object ends in a growing text, every character once.

    Args:
        tag: stands behind the object; the end is then where it begins, if it is in no string.
    """

    def __init__(self, tag: str = "") -> None:
        self._tag = tag
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._pattern = re.compile(r'["\\{}\[\]]' + (f"|{re.escape(tag)}" if tag else ""))

    def find(self, text: str, begin: int) -> int | None:
        """The end in `text`, whose object begins at `begin`; None: it has not come."""
        at = max(self._at, begin)
        while (match := self._pattern.search(text, at)) is not None:
            sign = match[0]
            at = match.end()
            if sign == "\\" and self._in_string:
                # What it escapes may not have come yet.
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                # A tag in a string may overlap the string's end.
                at = match.start() + 1
            elif sign == self._tag:
                return match.start()
            elif not self._tag:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(sign, 0)
                if self._depth == 0:
                    return at
        self._at = max(at, len(text) - max(0, len(self._tag) - 1))
        return None


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag`, short of all of it, that ends `text`."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


def _read_call(
    text: str,
    name_keys: Sequence[str],
    argument_keys: Sequence[str],
    tools: Collection[str] | None,
) -> _Call | None:
    """The call that a JSON object is; None: it is none."""
    try:
        members = _members(text)
    except (ValueError, RecursionError):
        return None
    name = next((members[key][0] for key in name_keys if key in members), None)
    value, arguments = next((members[key] for key in argument_keys if key in members), ({}, "{}"))
    if not isinstance(name, str) or not isinstance(value, dict):
        return None
    if tools is not None and name not in tools:
        return None
    return _Call(name, arguments)


_BEGUN_CALL = re.compile(
    r'\{\s*"(?:name|function)"\s*:\s*("(?:[^"\\]|\\.)*")\s*'
    r'(?:,\s*"(?:arguments|parameters)"\s*:\s*|,?[^{]*$)'
)
"""A call up to its arguments, or as much of that as was written behind its name."""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object: name -> (value, the value as written). Raises ValueError."""
    value, end = _DECODER.raw_decode(text, _skip(text, 0))
    if not isinstance(value, dict) or _skip(text, end) != len(text):
        raise ValueError("no object")
    members = {}
    # The object is whole: from here on nothing can be missing.
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        value, end = _DECODER.raw_decode(text, begin)
        members[key] = value, text[begin:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: str, parser: str, *, several: bool = False
) -> Grammar | None:
    """A grammar that makes an output a call.

    Args:
        tools: as in a request: `{"type": "function", "function": {"name", "parameters"}}`.
        choice: "required", or the name of the function that is to be called; "none" and "auto"
            ask for nothing.
        parser: one of `PARSERS`, whose form the call takes.
        several: with "required", more calls may follow the first. The model must be able to end
            its output then.

    Returns:
        None where no call is asked for.

    Raises:
        BadRequest: no tool has the name.
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
    follow = f" ({quoted(between)} call)*" if several and choice == "required" else ""
    names = " | ".join(f"call_{i}" for i in range(len(functions)))
    lines = [f"start: call{follow}", f"call: {quoted(before)} ({names}) {quoted(after)}"]
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        lines.append(f"call_{i}: {quoted(head)} arguments_{i} {quoted('}')}")
        lines.append(f"arguments_{i}: {json_rule(arguments_schema(function))}")
    return Grammar("ebnf", "\n".join(lines))


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever it says."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {**parameters, "type": "object"}


def quoted(text: str) -> str:
    """A literal of Lark, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
