"""What all readers of tool calls share: what they find, and a search for the end of JSON."""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.server.tool_calls.json_calls import SPACE, Call

Tools = Mapping[str, Mapping[str, Any]]
"""Functions that may be called: name -> JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A call begins; `name` is the function."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments, which are JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The call is whole."""


Found = str | Begin | Arguments | End
"""A text of the answer, or a part of a call."""
Steps = Generator[Found, None, bool]
"""What a step of a reader finds; it returns whether there may be another step."""


def whole(call: Call) -> Iterator[Found]:
    """A call that was read at once."""
    yield from (Begin(call.name), Arguments(call.arguments), End())


class Reader(ABC):
    """Splits a growing text into text and calls.

    Args:
        tools: what may be called; None: any function. A call of another one is text.
    """

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._held = ""
        """What may still become a call."""
        self._called = False
        """What was emitted last is a call: white space behind it is not shown."""

    @abstractmethod
    def feed(self, text: str) -> Iterator[Found]:
        """Take more text."""

    @abstractmethod
    def close(self, complete: bool) -> Iterator[Found]:
        """The rest of the text; `complete`: the model ended it, it was not cut off."""

    def _may_call(self, name: str) -> bool:
        return self._tools is None or name in self._tools

    def _text(self, text: str) -> str:
        """Text to show; after a call without the space that sets it off."""
        if self._called:
            text = text.lstrip(SPACE)
            self._called = not text
        return text

    def _settled(self, size: int) -> str:
        """The first `size` characters as text, but for the space at their end: a call may follow,
        and then it is not shown."""
        shown = self._held[:size].rstrip(SPACE)
        self._held = self._held[len(shown) :]
        return self._text(shown)


class JsonEnd:
    """Looks for where JSON ends in a growing text, every character once.

    Args:
        tags: one of them may stand behind it; the end is where the first one begins that is in no
            string.
        depth: brackets that are open at the beginning; the end is behind the one that closes the
            last. None: brackets do not count.
    """

    def __init__(self, *tags: str, depth: int | None = None) -> None:
        self._tags = tags
        self._depth = depth
        self._at = 0
        self._in_string = False
        self._pattern = re.compile("|".join([r'["\\{}\[\]]', *map(re.escape, tags)]))

    def find(self, text: str, begin: int = 0) -> int | None:
        """The end in `text`, whose JSON begins at `begin`; None: it has not come."""
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
            elif self._depth is not None:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(sign, 0)
                if self._depth <= 0:
                    return at
        longest = max(map(len, self._tags), default=1)
        self._at = max(at, len(text) - (longest - 1))
        return None

    def inside(self, text: str) -> int:
        """Characters of `text` that surely belong to the JSON, when `find` has found no end."""
        return len(text) if self._in_string else len(text) - ending(text, self._tags)


class WrittenArguments:
    """The arguments of a call, a JSON object, emitted while they are generated.

    Args:
        tags: as in JsonEnd.
    """

    def __init__(self, *tags: str) -> None:
        self._end = JsonEnd(*tags, depth=0)
        self._emitted = 0

    def take(self, held: str) -> tuple[Arguments | None, int | None]:
        """What is new in `held`, which begins with the object, and where the object ends."""
        end = self._end.find(held)
        upto = self._end.inside(held) if end is None else end
        new = held[self._emitted : upto]
        self._emitted = max(self._emitted, upto)
        return (Arguments(new) if new else None), end


class WrittenCall:
    """A call as JSON, emitted while it is generated: its arguments, then the rest of its object.

    Args:
        tags: as in JsonEnd.

    Attributes:
        complete: the arguments are whole.
    """

    def __init__(self, *tags: str) -> None:
        self.complete = False
        self._arguments = WrittenArguments(*tags)
        self._rest = JsonEnd(*tags, depth=1)
        self._begin = 0

    def take(self, held: str) -> tuple[list[Found], int | None]:
        """What is new in `held`, which begins with the arguments, and where the object ends."""
        found: list[Found] = []
        if not self.complete:
            new, end = self._arguments.take(held)
            found += [] if new is None else [new]
            if end is None:
                return found, None
            self.complete, self._begin = True, end
        end = self._rest.find(held, self._begin)
        if end is not None and (
            more := _other_arguments(held[: self._begin], held[self._begin : end])
        ):
            # They are emitted too, although all arguments together are then no valid JSON.
            found.append(Arguments(more))
        return found, end


def _other_arguments(arguments: str, rest: str) -> str | None:
    """Other arguments that follow in a call's object, as they are written there."""
    again = _AGAIN.search(rest)
    if again is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        if json.JSONDecoder().raw_decode(rest, again.end())[0] == json.loads(arguments):
            return None
    return rest[again.start() :]


_AGAIN = re.compile(r',\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*")')


def overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag`, short of all of it, that ends `text`."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


def ending(text: str, tags: Iterable[str]) -> int:
    """`overlap` with any of several tags."""
    return max((overlap(text, tag) for tag in tags), default=0)
