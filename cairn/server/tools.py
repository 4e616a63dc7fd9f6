"""Parser of tool calls in model output.

A call is emitted as soon as it is certain: the markup of a known form, the name of a tool and the
beginning of its arguments have been generated. Text that only resembles a call is emitted unchanged
as text. White space around a call is part of its markup.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.errors import BadRequest
from cairn.server.tool_calls.base import Arguments, Begin, Found, whole
from cairn.server.tool_calls.forms import ALL, FORMS, NAMES
from cairn.server.tool_calls.json_calls import begun_call

HERMES = "hermes"
AUTO = "auto"


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


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole."""

    index: int


Piece = Text | CallBegin | CallArguments | CallEnd


def choose_parser(name: str, chat_template: str | None) -> str:
    """The parser for a model's calls.

    Args:
        name: a name of one of the forms, or "auto": by the chat template.
        chat_template: of the model, None when it has none: conversations get a plain form.

    Raises:
        BadRequest: it has no place for tools, or shows no format that is known.
    """
    if name != AUTO:
        return NAMES[name]
    if chat_template is None:
        # The plain form of conversations writes calls as Hermes models do.
        return HERMES
    for form in ALL:
        if form.mark.search(chat_template):
            return form.name
    if not re.search(r"\btools\b", chat_template):
        raise BadRequest(
            "tools were given, but the model's chat template has no place for them",
            "Leave tools out, or serve a model whose template shows tools",
        )
    raise BadRequest(
        "tools were given, but the model's chat template shows no format of tool calls",
        f"Leave tools out, or start the server with --tool-parser ({', '.join(FORMS)})",
    )


class ToolParser:
    """Finds the calls in one answer while it is written.

    However the text is split, the pieces joined are the same.

    Args:
        name: of a form.
        tools: what may be called, with the schemas of the arguments where they are known; None:
            any function. A call of another one is text.
        new_id: gives the calls their ids.
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
        """Take more text; returns the pieces that are certain by now."""
        return self._pieces(self._reader.feed(text))

    def close(self, complete: bool = True) -> list[Piece]:
        """The rest, when no text follows; `complete`: the model ended it, it was not cut off."""
        return self._pieces(self._reader.close(complete))

    def cut(self) -> list[Piece]:
        """The rest of an output that is calls alone and was cut off: a call with the arguments that
        were written, or nothing when not even its name was."""
        closed = self.close(complete=False)
        rest = "".join(piece.text for piece in closed if isinstance(piece, Text))
        pieces: list[Piece] = [piece for piece in closed if not isinstance(piece, Text)]
        begun = begun_call(rest)
        return pieces if begun is None else pieces + self._pieces(whole(begun))

    def _pieces(self, found: Iterable[Found]) -> list[Piece]:
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
