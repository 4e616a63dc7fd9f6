"""Parser of outputs that are JSON calls without markup (Llama 3)."""

from __future__ import annotations

import re
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
)
from cairn.server.tool_calls.json_calls import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    SEPARATORS,
    SPACE,
    begun_arguments,
    read_calls,
    read_unclosed_calls,
)

PYTHON_TAG = "<|python_tag|>"


class Llama3(SteppedReader):
    """Outputs that consist of `{"name": ..., "parameters": {...}}`, or several of these separated
    by `;` or in a list, optionally after `<|python_tag|>`."""

    _KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type")
    _FIRST_KEY = re.compile(r'(?:\[[ \t\r\n]*)?(?:\{[ \t\r\n]*(?:"([^"]*)("?))?)?')

    def __init__(self, tools: Tools | None) -> None:
        super().__init__(tools)
        self._plain = False
        self._start = 0
        self._object: JsonEnd | None = None
        """Finds the end of the call at the beginning of `_held`, None outside of a call."""
        self._call: WrittenCall | None = None
        """Emits the call whose arguments begin `_held`, None outside of arguments."""

    def _step(self) -> Steps:
        if self._call is not None:
            found, end = self._call.take(self._held)
            yield from found
            if end is not None:
                yield End()
                self._call, self._called, self._held = None, True, self._held[end:]
            return end is not None
        if self._plain:
            yield from self._give_up()
            return False
        return (yield from self._in_object())

    def _in_object(self) -> Steps:
        if self._object is None:
            start = self._find_start()
            if start is None:
                return False
            if start < 0:
                self._plain = True
                return True
            self._start = start
            self._object = JsonEnd(depth=0)
        if self._is_other():
            self._plain = True
            return True
        begun = begun_arguments(self._held, self._start)
        if begun is not None and self._may_call(begun[0]):
            yield Begin(begun[0])
            self._held = self._held[begun[1] :]
            self._object, self._call = None, WrittenCall()
            return True
        end = self._object.find(self._held, self._start)
        if end is None:
            return False
        calls = read_calls(self._held[self._start : end], self._tools)
        if calls is None:
            self._plain = True
            return True
        for call in calls:
            yield from complete_call(call)
        self._called = True
        self._object = None
        self._held = self._held[end:]
        return True

    def close(self, complete: bool) -> Iterator[CallEvent]:
        """See Reader."""
        if self._call is not None:
            if complete or self._call.complete:
                yield End()
            return
        if complete and self._object is not None:
            calls = read_unclosed_calls(self._held[self._start :], self._tools)
            for call in calls or ():
                yield from complete_call(call)
            if calls is not None:
                self._held = ""
        yield from self._give_up()

    def _give_up(self) -> Iterator[str]:
        """The rest of the output is text."""
        self._plain = True
        held, self._held = self._held, ""
        yield self._text(held)

    def _find_start(self) -> int | None:
        """Offset of the next call's object; -1 if there is none, None if that is not known yet."""
        text = self._held.lstrip(SEPARATORS if self._called else SPACE)
        if not self._called and text.startswith(PYTHON_TAG):
            text = text[len(PYTHON_TAG) :].lstrip(SPACE)
        elif not self._called and PYTHON_TAG.startswith(text):
            return None
        if not text:
            return None
        return len(self._held) - len(text) if text[0] in "{[" else -1

    def _is_other(self) -> bool:
        """Whether the object's first key, possibly incomplete, cannot be a key of a call."""
        match = self._FIRST_KEY.match(self._held, self._start)
        assert match is not None
        if match[1] is None:
            return match.end() < len(self._held)
        if match[2]:
            return match[1] not in self._KEYS
        return not any(key.startswith(match[1]) for key in self._KEYS)
