"""Parsers of tool calls in model output.

A call is told when it is whole: a known form, a name, and arguments that are a JSON object (see
`read_calls`). What looks like a call and is none stays text, to the last character. White space
beside a call belongs to its markup.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from cairn.errors import BadRequest
from cairn.server.calls import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    SEPARATORS,
    SPACE,
    Call,
    begun_call,
    read_calls,
)

HERMES = "hermes"
LLAMA3_JSON = "llama3_json"
PARSERS = (HERMES, LLAMA3_JSON)

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


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

    def close(self, complete: bool = True) -> list[Piece]:
        """The rest, when no text follows; `complete`: the model ended it, it was not cut off."""
        return self._told(self._reader.close(complete))

    def cut(self) -> list[Piece]:
        """The rest of an output that is calls alone and was cut off: a call with the arguments that
        were written, or nothing when not even its name was."""
        closed = self.close(complete=False)
        rest = "".join(piece.text for piece in closed if isinstance(piece, Text))
        pieces: list[Piece] = [piece for piece in closed if not isinstance(piece, Text)]
        begun = begun_call(rest)
        return pieces if begun is None else pieces + self._told(iter([begun]))

    def _told(self, found: Iterator[str | Call]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in found:
            if isinstance(part, Call):
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
    def feed(self, text: str) -> Iterator[str | Call]:
        """Take more text."""

    @abstractmethod
    def close(self, complete: bool) -> Iterator[str | Call]:
        """The rest of the text."""

    def _text(self, text: str) -> str:
        """Text to show; after a call without the space that sets it off."""
        if self._called:
            text = text.lstrip(SPACE)
            self._called = not text
        return text


class _Hermes(_Reader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and several times.

    The closing tag may be missing before the next opening one and at the end of a complete text:
    models end their turn instead of writing it.
    """

    def feed(self, text: str) -> Iterator[str | Call]:
        self._held += text
        while True:
            if self._object is None:
                start = self._held.find(OPEN_TAG)
                if start < 0:
                    yield self._settled(len(self._held) - _overlap(self._held, OPEN_TAG))
                    return
                yield self._settled(start)
                self._object = _ObjectEnd(OPEN_TAG, CLOSE_TAG)
            begin = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            end = self._object.find(self._held, begin)
            if end is None:
                return
            rest = self._held[end:].removeprefix(CLOSE_TAG)
            yield from self._decide(self._held[begin:end], rest)

    def close(self, complete: bool) -> Iterator[str | Call]:
        while self._object is not None:
            # In a tag that holds no call, a call may follow.
            begin = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            end = len(self._held) - _overlap(self._held, CLOSE_TAG)
            yield from self._decide(self._held[begin:end] if complete else "", "")
            yield from self.feed("")
        yield self._text(self._held)
        self._held = ""

    def _decide(self, inside: str, rest: str) -> Iterator[str | Call]:
        """Tell the calls inside a tag and go on with the rest; without any the tag is text."""
        calls = read_calls(inside, self._tools)
        self._object = None
        if calls is None:
            size = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            yield self._text(self._held[:size])
            self._held = self._held[size:]
            return
        yield from calls
        self._called = True
        self._held = rest

    def _settled(self, size: int) -> str:
        """The first `size` characters as text, but for the space at their end: a call may follow,
        and then it is not shown."""
        shown = self._held[:size].rstrip(SPACE)
        self._held = self._held[len(shown) :]
        return self._text(shown)


class _Llama3(_Reader):
    """An answer that is nothing but `{"name": ..., "parameters": {...}}`, or several of these
    with `;` between them or in a list, maybe behind `<|python_tag|>`."""

    _KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type")
    _FIRST_KEY = re.compile(r'(?:\[[ \t\r\n]*)?(?:\{[ \t\r\n]*(?:"([^"]*)("?))?)?')

    def __init__(self, tools: Collection[str] | None) -> None:
        super().__init__(tools)
        self._plain = False
        self._start = 0

    def feed(self, text: str) -> Iterator[str | Call]:
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
            calls = read_calls(self._held[self._start : end], self._tools)
            if calls is None:
                break
            yield from calls
            self._called = True
            self._object = None
            self._held = self._held[end:]
        yield from self._give_up()

    def close(self, complete: bool) -> Iterator[str | Call]:
        yield from self._give_up()

    def _give_up(self) -> Iterator[str]:
        """The rest of the output is text."""
        self._plain = True
        held, self._held = self._held, ""
        yield self._text(held)

    def _find_start(self) -> int | None:
        """Where the next call's object begins; -1: there is none, None: not known yet."""
        text = self._held.lstrip(SEPARATORS if self._called else SPACE)
        if not self._called and text.startswith(PYTHON_TAG):
            text = text[len(PYTHON_TAG) :].lstrip(SPACE)
        elif not self._called and PYTHON_TAG.startswith(text):
            return None
        if not text:
            return None
        return len(self._held) - len(text) if text[0] in "{[" else -1

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
    """Looks for where a JSON object or list ends in a growing text, every character once.

    Args:
        tags: one of them stands behind it; the end is then where the first one begins that is in
            no string.
    """

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._pattern = re.compile("|".join([r'["\\{}\[\]]', *map(re.escape, tags)]))

    def find(self, text: str, begin: int) -> int | None:
        """The end in `text`, whose object begins at `begin`; None: it has not come."""
        at = max(self._at, begin)
        while (match := self._pattern.search(text, at)) is not None:
            sign = match[0]
            at = match.end()
            if sign == "\\" and self._in_string:
                # The character after a backslash may not have arrived yet.
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                # A tag in a string may overlap the string's end.
                at = match.start() + 1
            elif sign in self._tags:
                return match.start()
            elif not self._tags:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(sign, 0)
                if self._depth == 0:
                    return at
        longest = max(map(len, self._tags), default=1)
        self._at = max(at, len(text) - (longest - 1))
        return None


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag`, short of all of it, that ends `text`."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
