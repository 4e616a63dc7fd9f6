"""Base class of the readers of tool calls, their events, and a search for the end of JSON."""

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
    """A call of the function `name` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A fragment of the arguments, which are JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The call is complete."""


CallEvent = str | Begin | Arguments | End
"""Text of the answer, or an event of a call."""
Steps = Generator[CallEvent, None, bool]
"""Events of one parser step. The generator returns whether to try another step."""


def complete_call(call: Call) -> Iterator[CallEvent]:
    """The events of a complete call."""
    yield from (Begin(call.name), Arguments(call.arguments), End())


class Reader(ABC):
    """Splits an output that arrives in pieces into text and calls.

    Args:
        tools: functions that may be called, None for any. Calls of other functions remain text.
    """

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._held = ""
        """Output that may become part of a call."""
        self._called = False
        """The last event belongs to a call, so the next white space is dropped."""

    @abstractmethod
    def feed(self, text: str) -> Iterator[CallEvent]:
        """Add output text and yield the events that are now certain."""

    @abstractmethod
    def close(self, complete: bool) -> Iterator[CallEvent]:
        """Yield the remaining events. `complete` is False for an output that was truncated."""

    def _may_call(self, name: str) -> bool:
        return self._tools is None or name in self._tools

    def _text(self, text: str) -> str:
        """Text of the answer, without leading white space after a call."""
        if self._called:
            text = text.lstrip(SPACE)
            self._called = not text
        return text

    def _settled(self, size: int) -> str:
        """Take the first `size` held characters as text. White space at their end stays held,
        because it is dropped if a call follows."""
        shown = self._held[:size].rstrip(SPACE)
        self._held = self._held[len(shown) :]
        return self._text(shown)


class SteppedReader(Reader):
    """A reader that parses the held text in steps."""

    def feed(self, text: str) -> Iterator[CallEvent]:
        """See Reader."""
        self._held += text
        while (yield from self._step()):
            pass

    @abstractmethod
    def _step(self) -> Steps:
        """Parse the next part of `_held`."""


class JsonEnd:
    """Finds the end of JSON in a growing text. Scans every character once.

    Args:
        tags: closing tags; the JSON ends before the first one outside of strings.
        depth: number of brackets open at the beginning; the JSON ends when all are closed. None
            ignores brackets.
    """

    def __init__(self, *tags: str, depth: int | None = None) -> None:
        self._tags = tags
        self._depth = depth
        self._at = 0
        self._in_string = False
        self._pattern = re.compile("|".join([r'["\\{}\[\]]', *map(re.escape, tags)]))

    def find(self, text: str, begin: int = 0) -> int | None:
        """Offset of the end of the JSON that begins at `begin`; None if `text` does not contain
        it."""
        at = max(self._at, begin)
        while (match := self._pattern.search(text, at)) is not None:
            sign = match[0]
            at = match.end()
            if sign == "\\" and self._in_string:
                # Skip the escaped character, which may not have arrived.
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                # A tag in a string may overlap the end of the string.
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
        """Number of characters of `text` that belong to the JSON, if `find` returned None."""
        return len(text) if self._in_string else len(text) - ending(text, self._tags)


class WrittenArguments:
    """Emits the arguments of a call, a JSON object, as they are generated.

    Args:
        tags: as in JsonEnd.
    """

    def __init__(self, *tags: str) -> None:
        self._end = JsonEnd(*tags, depth=0)
        self._emitted = 0

    def take(self, held: str) -> tuple[Arguments | None, int | None]:
        """The new arguments in `held`, which begins with the object, and the object's end or
        None."""
        end = self._end.find(held)
        upto = self._end.inside(held) if end is None else end
        new = held[self._emitted : upto]
        self._emitted = max(self._emitted, upto)
        return (Arguments(new) if new else None), end


class WrittenCall:
    """Emits a call in JSON as it is generated: its arguments, then the rest of its object.

    Args:
        tags: as in JsonEnd.

    Attributes:
        complete: the arguments are complete.
    """

    def __init__(self, *tags: str) -> None:
        self.complete = False
        self._arguments = WrittenArguments(*tags)
        self._rest = JsonEnd(*tags, depth=1)
        self._begin = 0

    def take(self, held: str) -> tuple[list[CallEvent], int | None]:
        """The new events in `held`, which begins with the arguments, and the call's end or None."""
        found: list[CallEvent] = []
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
            # The client should see them, although the concatenated arguments are invalid JSON.
            found.append(Arguments(more))
        return found, end


def _other_arguments(arguments: str, rest: str) -> str | None:
    """A second, different `arguments` member in the rest of a call's object, or None."""
    again = _AGAIN.search(rest)
    if again is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        if json.JSONDecoder().raw_decode(rest, again.end())[0] == json.loads(arguments):
            return None
    return rest[again.start() :]


_AGAIN = re.compile(r',\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*")')


def overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` that `text` ends with."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


def ending(text: str, tags: Iterable[str]) -> int:
    """The longest `overlap` with any of the tags."""
    return max((overlap(text, tag) for tag in tags), default=0)
