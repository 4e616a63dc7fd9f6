"""Separates the reasoning of a model from its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from cairn.engine.grammar import rule_of
from cairn.engine.tokenizer import Tokenizer
from cairn.server.thoughts import Thought
from cairn.server.tool_calls.base import overlap
from cairn.types import Grammar

TAIL = 16
"""Tokens at the end of a prompt in which the opening marker of reasoning is looked for."""


def is_open(thought: Thought, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends inside of reasoning, which the output continues."""
    text = "".join(tokenizer.token_text(token) for token in prompt[-TAIL:])
    return text.rstrip().endswith(thought.begin)


class ThoughtReader:
    """Splits a growing output into the reasoning, which comes first, and the answer.

    However the text is split, the pieces joined are the same. Line breaks beside the markers
    belong to the markup.

    Args:
        thought: its markers.
        begun: the prompt ends inside of reasoning.
    """

    def __init__(self, thought: Thought, begun: bool) -> None:
        self._thought = thought
        self._held = ""
        self._inside = begun
        self._over = False
        self._first = True
        """Line breaks at the beginning of what follows are not shown."""

    def feed(self, text: str) -> tuple[str, str]:
        """Take more text; returns what is certain by now: reasoning and answer."""
        self._held += text
        if self._over:
            return "", self._answer()
        if not self._inside:
            rest = self._held.lstrip()
            if rest.startswith(self._thought.begin):
                self._inside, self._held = True, rest[len(self._thought.begin) :]
            elif self._thought.begin.startswith(rest):
                return "", ""
            else:
                # The answer begins at once; nothing of it was markup.
                self._over, self._first = True, False
                return "", self._answer()
        return self._in_thought()

    def close(self) -> tuple[str, str]:
        """The rest, when no text follows."""
        held, self._held = self._held, ""
        if self._inside and not self._over:
            return held.lstrip("\n") if self._first else held, ""
        return "", held.lstrip("\n") if self._first else held

    def _in_thought(self) -> tuple[str, str]:
        end = self._held.find(self._thought.end)
        if end >= 0:
            thought = self._begun(self._held[:end].rstrip("\n"))
            self._held = self._held[end + len(self._thought.end) :]
            self._over = self._first = True
            return thought, self._answer()
        sure = self._held[: len(self._held) - overlap(self._held, self._thought.end)].rstrip("\n")
        self._held = self._held[len(sure) :]
        return self._begun(sure), ""

    def _answer(self) -> str:
        held, self._held = self._held, ""
        return self._begun(held)

    def _begun(self, text: str) -> str:
        if self._first:
            text = text.lstrip("\n")
            self._first = not text
        return text


_START = re.compile(r"\bstart\b")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def _rules(text: str) -> str:
    """A grammar without its literals and the texts of its schemas."""
    return _STRING.sub('""', text)


def behind_thought(
    grammar: Grammar, thought: Thought, special: Mapping[str, int]
) -> Grammar | None:
    """A grammar for an output that continues reasoning and then follows `grammar`.

    Args:
        grammar: of the answer.
        thought: the markers around the reasoning.
        special: special tokens of the tokenizer, name -> id.

    Returns:
        None for a grammar whose first rule cannot be renamed: it begins with the output.
    """
    if grammar.kind != "ebnf":
        answer = rule_of(grammar)
    elif grammar.text.startswith("start: ") and len(_START.findall(_rules(grammar.text))) == 1:
        answer = grammar.text.removeprefix("start: ")
    else:
        return None
    if thought.end in special:
        rule = f"thought: THOUGHT <[{special[thought.end]}]>"
    else:
        rule = f"thought[lazy]: THOUGHT {json.dumps(thought.end)}"
    lines = ("start: thought SPACE? reply", rule, r"THOUGHT: /(.|\n)*/", r"SPACE: /[ \r\n\t]+/")
    return Grammar("ebnf", "\n".join((*lines, f"reply: {answer}")))
