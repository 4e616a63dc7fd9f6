"""Parser of a list of Python calls (Llama 3.2, Llama 4)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from cairn.server.tool_calls.base import CallEvent, Reader, Tools, complete_call
from cairn.server.tool_calls.json_calls import SPACE, Call

START, STOP = "<|python_start|>", "<|python_end|>"
NAMES = {"true": True, "false": False, "null": None}
"""JSON literals that models write instead of Python's."""


class Pythonic(Reader):
    """Outputs that consist of `[f(a=1), g(b="x")]`, optionally between `<|python_start|>` and
    `<|python_end|>`. A call is emitted when its closing bracket arrives."""

    _BEGUN = re.compile(r"[ \t\r\n]*([A-Za-z_][\w.-]*)[ \t]*\(")
    _BEGUN_PARTLY = re.compile(r"[ \t\r\n]*(?:[A-Za-z_][\w.-]*[ \t]*)?\Z")

    def __init__(self, tools: Tools | None) -> None:
        super().__init__(tools)
        self._plain = False
        self._inside = False
        self._at = 0

    def feed(self, text: str) -> Iterator[CallEvent]:
        """See Reader."""
        self._held += text
        while not self._plain:
            if not self._inside:
                entered = self._enter()
                if entered is None:
                    return
                if not entered:
                    break
            began = self._BEGUN.match(self._held, self._at)
            if began is None:
                if self._BEGUN_PARTLY.match(self._held, self._at):
                    return
                break
            end = _closing(self._held, began.end())
            if end is None:
                return
            call = _read(began[1], self._held[began.end() : end - 1])
            if call is None or not self._may_call(call.name):
                break
            rest = self._held[end:].lstrip(SPACE)
            if not rest:
                return
            if rest[0] not in ",]":
                break
            yield from complete_call(call)
            self._called = True
            self._held, self._at = rest[1:], 0
            if rest[0] == "]":
                self._plain = True
                self._held = self._held.lstrip(SPACE)
                break
        yield from self._give_up()

    def close(self, complete: bool) -> Iterator[CallEvent]:
        """See Reader."""
        call = self._last_call() if complete and self._inside and not self._plain else None
        if call is not None:
            yield from complete_call(call)
            self._held = ""
        yield from self._give_up(final=True)

    def _last_call(self) -> Call | None:
        """The last call of a list without its closing bracket."""
        began = self._BEGUN.match(self._held, self._at)
        end = None if began is None else _closing(self._held, began.end())
        if began is None or end is None or self._held[end:].strip(SPACE):
            return None
        call = _read(began[1], self._held[began.end() : end - 1])
        return call if call is not None and self._may_call(call.name) else None

    def _enter(self) -> bool | None:
        """Whether the output begins with a list; None if that is not known yet."""
        text = self._held.lstrip(SPACE)
        if text.startswith(START):
            text = text[len(START) :].lstrip(SPACE)
        elif START.startswith(text):
            return None
        if not text:
            return None
        self._inside = text[0] == "["
        self._at = len(self._held) - len(text) + 1
        return self._inside

    def _give_up(self, final: bool = False) -> Iterator[CallEvent]:
        """The rest of the output is text."""
        self._plain = True
        if self._called and not final and STOP.startswith(self._held.lstrip(SPACE)):
            return
        held, self._held = self._held, ""
        if self._called:
            held = held.lstrip(SPACE).removeprefix(STOP)
        yield self._text(held)


def _closing(text: str, at: int) -> int | None:
    """Offset at which the bracket that is open before `at` closes; None if it does not."""
    depth, quote = 1, ""
    while at < len(text):
        sign = text[at]
        at += 1
        if sign == "\\" and quote:
            at += 1
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth == 0:
                return at
    return None


def _read(name: str, arguments: str) -> Call | None:
    """A call whose arguments are keywords with constant values; None for any other."""
    try:
        tree = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(tree, ast.Call)
        if tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return None
        given = {str(keyword.arg): _value(keyword.value) for keyword in tree.keywords}
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return Call(name, text)


def _value(node: ast.expr) -> Any:
    class Constants(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant(NAMES[name.id]) if name.id in NAMES else name

    value = ast.literal_eval(Constants().visit(node))
    return list(value) if isinstance(value, tuple | set) else value
