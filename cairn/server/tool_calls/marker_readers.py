"""Parsers of calls between markers, with the function's name outside of the arguments."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cairn.server.tool_calls.base import (
    Arguments,
    Begin,
    CallEvent,
    End,
    JsonEnd,
    SteppedReader,
    Steps,
    Tools,
    WrittenArguments,
    complete_call,
    ending,
)
from cairn.server.tool_calls.json_calls import SPACE, read_calls, read_unclosed_calls
from cairn.server.tool_calls.values import PLAIN, json_value, kinds_of

LONGEST_HEAD = 256
"""Maximum number of characters between the opening marker of a call and its arguments."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markup of a format.

    Attributes:
        begin: opening marker of a call.
        before, after: optional markers around all calls.
        head: pattern between `begin` and the arguments; group 1 is the function's name.
        end: closing marker of a call; may be empty.
    """

    begin: str
    head: re.Pattern[str]
    end: str = ""
    before: str = ""
    after: str = ""


class MarkerReader(SteppedReader):
    """Base class for calls that begin with a marker, anywhere in a text.

    Args:
        tools: see Reader.
        markers: the markup of the format.
    """

    def __init__(self, tools: Tools | None, markers: Markers) -> None:
        super().__init__(tools)
        self._markers = markers
        self._state: Callable[[], Steps] = self._outside

    def _step(self) -> Steps:
        return self._state()

    def close(self, complete: bool) -> Iterator[CallEvent]:
        """See Reader."""
        if self._state == self._outside:
            yield self._text(self._held)
            self._held = ""
        else:
            yield from self._close_call(complete)

    def _outside(self) -> Steps:
        """Step outside of calls."""
        markers = self._markers
        starts = [tag for tag in (markers.before, markers.begin) if tag]
        found = [at for tag in starts if (at := self._held.find(tag)) >= 0]
        if not found:
            yield self._settled(len(self._held) - ending(self._held, starts))
            return False
        at = min(found)
        yield self._settled(at)
        rest = self._held.lstrip(SPACE)
        inner = rest.removeprefix(markers.before).lstrip(SPACE) if markers.before else rest
        if inner.startswith(markers.begin):
            return (yield from self._at_head(inner[len(markers.begin) :]))
        if markers.begin.startswith(inner):
            return False
        yield from self._no_call()
        return True

    def _at_head(self, rest: str) -> Steps:
        head = self._markers.head.match(rest[:LONGEST_HEAD])
        if head is None:
            if (yield from self._other_head(rest)):
                return True
            if len(rest) < LONGEST_HEAD:
                return False
            yield from self._no_call()
            return True
        if not self._may_call(head[1]):
            yield from self._no_call()
            return True
        yield Begin(head[1])
        self._held = rest[head.end() :]
        self._begin_call(head[1])
        return True

    def _other_head(self, rest: str) -> Steps:
        """Step for another kind of call after the opening marker; overridden by subclasses."""
        yield from ()
        return False

    def _no_call(self) -> Iterator[CallEvent]:
        """Emit a rejected beginning of a call as text, up to the next possible one."""
        space = len(self._held) - len(self._held.lstrip(SPACE))
        yield self._text(self._held[: space + 1])
        self._held = self._held[space + 1 :]

    def _end_call(self) -> Iterator[CallEvent]:
        yield End()
        self._called, self._state = True, self._behind

    def _behind(self) -> Steps:
        """Step after a call, where the closing marker of all calls may follow."""
        after = self._markers.after
        rest = self._held.lstrip(SPACE)
        if after and rest != after and after.startswith(rest):
            return False
        if after and rest.startswith(after):
            self._held = rest[len(after) :]
        self._state = self._outside
        yield from ()
        return True

    @abstractmethod
    def _begin_call(self, name: str) -> None:
        """Start the arguments of a call, which begin at the beginning of `_held`."""

    @abstractmethod
    def _close_call(self, complete: bool) -> Iterator[CallEvent]:
        """Yield the last events of an output that ends in a call or in the markup after one."""


class JsonArgumentsReader(MarkerReader):
    """Calls whose arguments are a JSON object: Mistral's `[TOOL_CALLS]name[ARGS]{...}`, DeepSeek
    V3.

    Also reads Mistral's older list, `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`.
    """

    def __init__(self, tools: Tools | None, markers: Markers) -> None:
        super().__init__(tools, markers)
        self._arguments = WrittenArguments()
        self._list = JsonEnd(depth=0)

    def _begin_call(self, name: str) -> None:
        tags = [tag for tag in (self._markers.begin, self._markers.end, self._markers.after) if tag]
        self._arguments = WrittenArguments(*tags)
        self._state = self._in_arguments

    def _in_arguments(self) -> Steps:
        new, end = self._arguments.take(self._held)
        if new is not None:
            yield new
        if end is None:
            return False
        self._held = self._held[end:]
        self._state = self._in_tail
        return True

    def _in_tail(self) -> Steps:
        end = self._markers.end
        # DeepSeek V3 puts the arguments in a Markdown code block.
        rest = self._held.lstrip(SPACE + "`}") if end else self._held
        if end and rest != end and end.startswith(rest):
            return False
        if end:
            self._held = rest.removeprefix(end)
        yield from self._end_call()
        return True

    def _other_head(self, rest: str) -> Steps:
        if rest.lstrip(SPACE)[:1] not in ("[", "{"):
            return False
        self._held, self._state = rest, self._in_list
        self._list = JsonEnd(depth=0)
        yield from ()
        return True

    def _in_list(self) -> Steps:
        end = self._list.find(self._held)
        if end is None:
            return False
        calls = read_calls(self._held[:end], self._tools)
        if calls is None:
            yield self._text(self._markers.begin + self._held[:end])
        for call in calls or ():
            yield from complete_call(call)
        self._held, self._called = self._held[end:], bool(calls)
        self._state = self._behind if calls else self._outside
        return True

    def _close_call(self, complete: bool) -> Iterator[CallEvent]:
        if self._state == self._in_list:
            calls = read_unclosed_calls(self._held, self._tools) if complete else None
            for call in calls or ():
                yield from complete_call(call)
            if calls is None:
                yield self._text(self._markers.begin + self._held)
        elif self._state == self._in_tail or (complete and self._state == self._in_arguments):
            yield End()


@dataclass(frozen=True, slots=True)
class ParameterMarkers:
    """The markup of a parameter.

    Attributes:
        begin: opening marker.
        head: pattern of the whole opening tag; group 1 is the parameter's name, the optional group
            `string` is "true" for a plain text and "false" for JSON.
        end: closing marker.
    """

    begin: str
    head: re.Pattern[str]
    end: str


class ParametersReader(MarkerReader):
    """Calls with one tag per parameter: Qwen3-Coder, DeepSeek V3.2.

    The value is plain text if the tool's schema says that it is a string, else JSON.
    """

    def __init__(self, tools: Tools | None, markers: Markers, parameter: ParameterMarkers) -> None:
        super().__init__(tools, markers)
        self._parameter = parameter
        self._name = self._key = ""
        self._first = True
        self._plain = False
        self._begun = False

    def _begin_call(self, name: str) -> None:
        self._name, self._first, self._state = name, True, self._in_call

    def _in_call(self) -> Steps:
        """Step between parameters."""
        parameter, end = self._parameter, self._markers.end
        rest = self._held.lstrip(SPACE)
        if rest.startswith(end):
            self._held = rest[len(end) :]
            yield Arguments("{}" if self._first else "}")
            yield from self._end_call()
            return True
        if rest.startswith(parameter.begin):
            head = parameter.head.match(rest[:LONGEST_HEAD])
            if head is None and len(rest) < LONGEST_HEAD:
                return False
            if head is not None:
                self._held = rest[head.end() :]
                yield from self._begin_value(head[1], head.groupdict().get("string"))
                return True
        elif end.startswith(rest) or parameter.begin.startswith(rest):
            return False
        # There is no parameter, so the call ends without its closing tag.
        yield Arguments("{}" if self._first else "}")
        yield from self._end_call()
        return True

    def _begin_value(self, key: str, string: str | None) -> Iterator[CallEvent]:
        yield Arguments(("{" if self._first else ", ") + json.dumps(key) + ": ")
        self._first, self._begun, self._key, self._state = False, False, key, self._in_value
        self._plain = self._kinds == PLAIN if string is None else string == "true"
        if self._plain:
            yield Arguments('"')

    @property
    def _kinds(self) -> frozenset[str] | None:
        return kinds_of((self._tools or {}).get(self._name) or {}, self._key)

    def _in_value(self) -> Steps:
        end = self._held.find(self._parameter.end)
        if not self._begun:
            # Skip the line break between tag and value.
            if not self._held:
                return False
            self._begun = True
            self._held = self._held.removeprefix("\n")
            return True
        if end < 0:
            if self._plain:
                sure = len(self._held) - ending(self._held, ("\n" + self._parameter.end,))
                sure -= ending(self._held[:sure], (self._parameter.end,)) if sure else 0
                yield from self._spell(self._held[:sure])
                self._held = self._held[sure:]
            return False
        yield from self._finish_value(self._held[:end].removesuffix("\n"))
        self._held = self._held[end + len(self._parameter.end) :]
        self._state = self._in_call
        return True

    def _finish_value(self, value: str) -> Iterator[CallEvent]:
        if not self._plain:
            yield Arguments(json_value(value, self._kinds))
            return
        yield from self._spell(value)
        yield Arguments('"')

    def _spell(self, text: str) -> Iterator[CallEvent]:
        if text:
            yield Arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _close_call(self, complete: bool) -> Iterator[CallEvent]:
        if self._state == self._behind:
            return
        if self._state == self._in_value:
            cut = self._held[: len(self._held) - ending(self._held, (self._parameter.end,))]
            if complete:
                yield from self._finish_value(cut.removesuffix("\n"))
            elif self._plain:
                yield from self._spell(cut)
        if complete:
            yield Arguments("{}" if self._first else "}")
            yield End()
