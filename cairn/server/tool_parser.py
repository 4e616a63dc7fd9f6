"""Parser of tool calls in model output.

A call is emitted as soon as it is certain, that is when the markup of a known format, the name of a
tool and the beginning of its arguments have been generated. Text that only resembles a call is
emitted as text. White space around a call is dropped.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.errors import BadRequest
from cairn.server.tool_calls.base import Arguments, Begin, CallEvent, complete_call
from cairn.server.tool_calls.formats import ALL, FORMS, NAMES
from cairn.server.tool_calls.json_calls import begun_call

HERMES = "hermes"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. `index` counts the calls of an output; tool messages refer to `id`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of a call's arguments. The fragments together are the JSON object that the model
    generated."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""

    index: int


Piece = Text | CallBegin | CallArguments | CallEnd


def choose_parser(name: str, chat_template: str | None) -> str:
    """Name of the format of a model's tool calls.

    Args:
        name: name of a format, or "auto" to detect it in the chat template.
        chat_template: the model's chat template; None for the built-in plain one.

    Raises:
        BadRequest: the template does not support tools, or has no known format of calls.
    """
    if name != AUTO:
        return NAMES[name]
    if chat_template is None:
        # The built-in chat template uses the Hermes format.
        return HERMES
    for form in ALL:
        if form.mark.search(chat_template):
            return form.name
    if not re.search(r"\btools\b", chat_template):
        raise BadRequest(
            "tools were given, but the chat template of the model does not support tools",
            "Leave tools out, or serve a model whose template shows tools",
        )
    raise BadRequest(
        "tools were given, but the chat template of the model has no known format of tool calls",
        f"Leave tools out, or start the server with --tool-parser ({', '.join(FORMS)})",
    )


class ToolParser:
    """Splits an output that arrives in pieces into text and tool calls.

    The result does not depend on how the output is cut into pieces.

    Args:
        name: name of the format.
        tools: names of functions that may be called, optionally with the schemas of their
            arguments; None for any function. Calls of other functions remain text.
        new_id: returns a new call id.
    """

    def __init__(
        self,
        name: str,
        tools: Mapping[str, Mapping[str, Any]] | Collection[str] | None = None,
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        known = tools if tools is None or isinstance(tools, Mapping) else {t: {} for t in tools}
        self._reader = FORMS[name].reader(known)
        self._new_id = new_id
        self._calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Add output text. Returns the pieces that are now certain."""
        return self._pieces(self._reader.feed(text))

    def close(self, complete: bool = True) -> list[Piece]:
        """End the output. Returns the remaining pieces. `complete` is False if it was truncated."""
        return self._pieces(self._reader.close(complete))

    def cut(self) -> list[Piece]:
        """End a truncated output that consists of calls only. Returns the last call with the
        arguments so far, or nothing if its name is incomplete."""
        closed = self.close(complete=False)
        rest = "".join(piece.text for piece in closed if isinstance(piece, Text))
        pieces: list[Piece] = [piece for piece in closed if not isinstance(piece, Text)]
        begun = begun_call(rest)
        return pieces if begun is None else pieces + self._pieces(complete_call(begun))

    def _pieces(self, found: Iterable[CallEvent]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in found:
            if isinstance(part, Begin):
                pieces.append(CallBegin(self._calls, self._new_id(), part.name))
                self._calls += 1
            elif isinstance(part, Arguments):
                pieces.append(CallArguments(self._calls - 1, part.text))
            elif isinstance(part, str):
                pieces += [Text(part)] if part else []
            else:
                pieces.append(CallEnd(self._calls - 1))
        return pieces
