"""Calls between markers, with the function's name outside of the arguments."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cairn.server.tool_calls.base import (
    Arguments,
    Begin,
    End,
    Found,
    JsonEnd,
    Reader,
    Steps,
    Tools,
    WrittenArguments,
    ending,
    whole,
)
from cairn.server.tool_calls.json_calls import SPACE, read_calls, read_unclosed_calls
from cairn.server.tool_calls.values import PLAIN, json_value, kinds_of

LONGEST_HEAD = 256
"""Characters between the marker of a call and its arguments."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markup of a form.

    Attributes:
        begin: what every call begins with.
        before, after: what may stand around the calls; no part of the answer's text.
        head: what follows `begin`, up to the arguments; its group 1 is the function's name.
        end: what ends a call; may be empty.
    """

    begin: str
    head: re.Pattern[str]
    end: str = ""
    before: str = ""
    after: str = ""


class Marked(Reader):
    """Calls that begin with a marker, anywhere in a text.

    Args:
        tools: see Reader.
        markers: of the form.
    """

    def __init__(self, tools: Tools | None, markers: Markers) -> None:
        super().__init__(tools)
        self._markers = markers
        self._step: Callable[[], Steps] = self._outside

    def feed(self, text: str) -> Iterator[Found]:
        """See Reader."""
        self._held += text
        while (yield from self._step()):
            pass

    def close(self, complete: bool) -> Iterator[Found]:
        """See Reader."""
        if self._step == self._outside:
            yield self._text(self._held)
            self._held = ""
        else:
            yield from self._close_call(complete)

    def _outside(self) -> Steps:
        """In the text; every step returns whether there may be another one."""
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
        """Look for another form of a call behind its marker."""
        yield from ()
        return False

    def _no_call(self) -> Iterator[Found]:
        """What looked like the beginning of a call is text, up to where one may begin next."""
        space = len(self._held) - len(self._held.lstrip(SPACE))
        yield self._text(self._held[: space + 1])
        self._held = self._held[space + 1 :]

    def _end_call(self) -> Iterator[Found]:
        yield End()
        self._called, self._step = True, self._behind

    def _behind(self) -> Steps:
        """Behind a call, where the markup around calls may end."""
        after = self._markers.after
        rest = self._held.lstrip(SPACE)
        if after and rest != after and after.startswith(rest):
            return False
        if after and rest.startswith(after):
            self._held = rest[len(after) :]
        self._step = self._outside
        yield from ()
        return True

    @abstractmethod
    def _begin_call(self, name: str) -> None:
        """`_held` begins behind the head of a call."""

    @abstractmethod
    def _close_call(self, complete: bool) -> Iterator[Found]:
        """The text ends in a call, or behind one where `_held` has begun to be markup."""


class Named(Marked):
    """Arguments are a JSON object: Mistral's `[TOOL_CALLS]name[ARGS]{...}`, DeepSeek's calls.

    Mistral's older list of objects, `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, is read too.
    """

    def __init__(self, tools: Tools | None, markers: Markers) -> None:
        super().__init__(tools, markers)
        self._arguments = WrittenArguments()
        self._list = JsonEnd(depth=0)

    def _begin_call(self, name: str) -> None:
        tags = [tag for tag in (self._markers.begin, self._markers.end, self._markers.after) if tag]
        self._arguments = WrittenArguments(*tags)
        self._step = self._in_arguments

    def _in_arguments(self) -> Steps:
        new, end = self._arguments.take(self._held)
        if new is not None:
            yield new
        if end is None:
            return False
        self._held = self._held[end:]
        self._step = self._in_tail
        return True

    def _in_tail(self) -> Steps:
        end = self._markers.end
        # DeepSeek puts the arguments in a block of Markdown.
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
        self._held, self._step = rest, self._in_list
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
            yield from whole(call)
        self._held, self._called = self._held[end:], bool(calls)
        self._step = self._behind if calls else self._outside
        return True

    def _close_call(self, complete: bool) -> Iterator[Found]:
        if self._step == self._in_list:
            calls = read_unclosed_calls(self._held, self._tools) if complete else None
            for call in calls or ():
                yield from whole(call)
            if calls is None:
                yield self._text(self._markers.begin + self._held)
        elif self._step == self._in_tail or (complete and self._step == self._in_arguments):
            yield End()


@dataclass(frozen=True, slots=True)
class ParameterMarkers:
    """The markup of a parameter.

    Attributes:
        begin: what every parameter begins with.
        head: all of its opening; group 1 is the name, and a group `string`, where there is one,
            says whether the value is plain text ("true") or JSON ("false").
        end: what ends it.
    """

    begin: str
    head: re.Pattern[str]
    end: str


class Tagged(Marked):
    """Every argument has a tag of its own: Qwen3-Coder's calls and those of DeepSeek V3.2.

    A value is written as plain text where the tool's schema says that it is a string, else as JSON.
    """

    def __init__(self, tools: Tools | None, markers: Markers, parameter: ParameterMarkers) -> None:
        super().__init__(tools, markers)
        self._parameter = parameter
        self._name = self._key = ""
        self._first = True
        self._plain = False
        self._begun = False

    def _begin_call(self, name: str) -> None:
        self._name, self._first, self._step = name, True, self._in_call

    def _in_call(self) -> Steps:
        """Between two parameters."""
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
        # No parameter: the call ends without its tag.
        yield Arguments("{}" if self._first else "}")
        yield from self._end_call()
        return True

    def _begin_value(self, key: str, string: str | None) -> Iterator[Found]:
        yield Arguments(("{" if self._first else ", ") + json.dumps(key) + ": ")
        self._first, self._begun, self._key, self._step = False, False, key, self._in_value
        self._plain = self._kinds == PLAIN if string is None else string == "true"
        if self._plain:
            yield Arguments('"')

    @property
    def _kinds(self) -> frozenset[str] | None:
        return kinds_of((self._tools or {}).get(self._name) or {}, self._key)

    def _in_value(self) -> Steps:
        end = self._held.find(self._parameter.end)
        if not self._begun:
            # A line break sets the value off from its tag.
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
        self._step = self._in_call
        return True

    def _finish_value(self, value: str) -> Iterator[Found]:
        if not self._plain:
            yield Arguments(json_value(value, self._kinds))
            return
        yield from self._spell(value)
        yield Arguments('"')

    def _spell(self, text: str) -> Iterator[Found]:
        if text:
            yield Arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _close_call(self, complete: bool) -> Iterator[Found]:
        if self._step == self._behind:
            return
        if self._step == self._in_value:
            cut = self._held[: len(self._held) - ending(self._held, (self._parameter.end,))]
            if complete:
                yield from self._finish_value(cut.removesuffix("\n"))
            elif self._plain:
                yield from self._spell(cut)
        if complete:
            yield Arguments("{}" if self._first else "}")
            yield End()
