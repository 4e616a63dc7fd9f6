"""Calls as JSON in tags, as Hermes and Qwen write them."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.server.tool_calls.base import (
    Begin,
    End,
    Found,
    JsonEnd,
    Reader,
    Steps,
    Tools,
    WrittenCall,
    overlap,
    whole,
)
from cairn.server.tool_calls.json_calls import SPACE, begun_arguments, read_unclosed_calls

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


class Hermes(Reader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and several times.

    Arguments are emitted while they are generated, once the first one has begun. The closing tag
    may be missing before the next opening one and at the end of a complete text: models end their
    turn instead of writing it.
    """

    def __init__(self, tools: Tools | None) -> None:
        super().__init__(tools)
        self._object: JsonEnd | None = None
        """The call that `_held` begins with, while it is open."""
        self._call: WrittenCall | None = None
        """That whose arguments `_held` begins with, while it is written."""
        self._ending = False
        """The call's object is over, its tag is not."""

    def feed(self, text: str) -> Iterator[Found]:
        """See Reader."""
        self._held += text
        while (yield from self._step()):
            pass

    def _step(self) -> Steps:
        """Go on by one part; returns whether there may be another one."""
        if self._call is not None:
            found, end = self._call.take(self._held)
            yield from found
            if end is not None:
                self._held = self._held[end:]
                self._call, self._ending = None, True
            return end is not None
        if self._ending:
            return (yield from self._in_ending())
        if self._object is None:
            start = self._held.find(OPEN_TAG)
            if start < 0:
                yield self._settled(len(self._held) - overlap(self._held, OPEN_TAG))
                return False
            yield self._settled(start)
            self._object = JsonEnd(OPEN_TAG, CLOSE_TAG)
        begin = self._held.index(OPEN_TAG) + len(OPEN_TAG)
        begun = begun_arguments(self._held, begin)
        if begun is not None and self._may_call(begun[0]):
            yield Begin(begun[0])
            self._held = self._held[begun[1] :]
            self._object, self._call = None, WrittenCall(OPEN_TAG, CLOSE_TAG)
            return True
        end = self._object.find(self._held, begin)
        if end is None:
            return False
        yield from self._decide(self._held[begin:end], self._held[end:].removeprefix(CLOSE_TAG))
        return True

    def _in_ending(self) -> Steps:
        self._held = self._held.lstrip(SPACE + "}],;")
        if CLOSE_TAG.startswith(self._held) and self._held != CLOSE_TAG:
            return False
        yield End()
        self._ending, self._called = False, True
        if self._held.startswith("{"):
            # Another call in the same tag.
            self._held = OPEN_TAG + self._held
        self._held = self._held.removeprefix(CLOSE_TAG)
        return True

    def close(self, complete: bool) -> Iterator[Found]:
        """See Reader."""
        if self._call is not None or self._ending:
            if complete or self._call is None or self._call.complete:
                yield End()
            return
        while self._object is not None:
            # In a tag that holds no call, a call may follow.
            begin = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            end = len(self._held) - overlap(self._held, CLOSE_TAG)
            yield from self._decide(self._held[begin:end] if complete else "", "")
            yield from self.feed("")
        yield self._text(self._held)
        self._held = ""

    def _decide(self, inside: str, rest: str) -> Iterator[Found]:
        """Emit the calls inside a tag and continue behind it; without any the tag is text."""
        calls = read_unclosed_calls(inside, self._tools)
        self._object = None
        if calls is None:
            size = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            yield self._text(self._held[:size])
            self._held = self._held[size:]
            return
        for call in calls:
            yield from whole(call)
        self._called = True
        self._held = rest
