"""Parser of calls in JSON between tags (Hermes, Qwen)."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.server.tool_calls.base import (
    Begin,
    CallEvent,
    End,
    JsonEnd,
    SteppedReader,
    Steps,
    Tools,
    WrittenCall,
    complete_call,
    overlap,
)
from cairn.server.tool_calls.json_calls import SPACE, begun_arguments, read_unclosed_calls

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


class Hermes(SteppedReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and several times.

    Arguments are emitted as they are generated, after the first one has begun. The closing tag may
    be missing before the next opening tag and at the end of a complete output, because some models
    leave it out.
    """

    def __init__(self, tools: Tools | None) -> None:
        super().__init__(tools)
        self._object: JsonEnd | None = None
        """Finds the end of the call at the beginning of `_held`, None outside of a call."""
        self._call: WrittenCall | None = None
        """Emits the call whose arguments begin `_held`, None outside of arguments."""
        self._ending = False
        """The object of a call is complete, its closing tag is not."""

    def _step(self) -> Steps:
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
            # A second call between the same tags.
            self._held = OPEN_TAG + self._held
        self._held = self._held.removeprefix(CLOSE_TAG)
        return True

    def close(self, complete: bool) -> Iterator[CallEvent]:
        """See Reader."""
        if self._call is not None or self._ending:
            if complete or self._call is None or self._call.complete:
                yield End()
            return
        while self._object is not None:
            # The text after a tag without a call may contain another call.
            begin = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            end = len(self._held) - overlap(self._held, CLOSE_TAG)
            yield from self._decide(self._held[begin:end] if complete else "", "")
            yield from self.feed("")
        yield self._text(self._held)
        self._held = ""

    def _decide(self, inside: str, rest: str) -> Iterator[CallEvent]:
        """Emit the calls between tags and continue after them; without calls, the tag is text."""
        calls = read_unclosed_calls(inside, self._tools)
        self._object = None
        if calls is None:
            size = self._held.index(OPEN_TAG) + len(OPEN_TAG)
            yield self._text(self._held[:size])
            self._held = self._held[size:]
            return
        for call in calls:
            yield from complete_call(call)
        self._called = True
        self._held = rest
