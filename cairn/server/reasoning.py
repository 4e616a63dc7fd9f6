"""Separates a model's reasoning from its answer, and counts the reasoning tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from cairn.engine.grammar import rule_of
from cairn.engine.tokenizer import Tokenizer
from cairn.server.reasoning_markers import ReasoningMarkers
from cairn.server.tool_calls.base import overlap
from cairn.types import Grammar

TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opening marker."""


def prompt_opens_reasoning(
    markers: ReasoningMarkers, prompt: Sequence[int], tokenizer: Tokenizer
) -> bool:
    """Whether the prompt ends with the opening marker, so that the output begins as reasoning."""
    text = "".join(tokenizer.token_text(token) for token in prompt[-TAIL:])
    return text.rstrip().endswith(markers.begin)


class ReasoningParser:
    """Splits an output that arrives in pieces into reasoning, which comes first, and answer.

    The result does not depend on how the output is cut into pieces. Line breaks next to a marker
    are removed with it.

    Args:
        markers: the markers around the reasoning.
        opened: the prompt already contains the opening marker.
    """

    def __init__(self, markers: ReasoningMarkers, opened: bool) -> None:
        self._markers = markers
        self._held = ""
        self._inside = opened
        self._over = False
        self._at_start = True
        """Strip line breaks from the beginning of the next text."""

    @property
    def in_reasoning(self) -> bool:
        """The opening marker has been seen, the closing one has not."""
        return self._inside and not self._over

    @property
    def in_answer(self) -> bool:
        """The reasoning has ended, or the output began without any."""
        return self._over

    def feed(self, text: str) -> tuple[str, str]:
        """Add output text. Returns the reasoning and the answer that are now certain."""
        self._held += text
        if self._over:
            return "", self._answer()
        if not self._inside:
            rest = self._held.lstrip()
            if rest.startswith(self._markers.begin):
                self._inside, self._held = True, rest[len(self._markers.begin) :]
            elif self._markers.begin.startswith(rest):
                return "", ""
            else:
                # There is no reasoning, so leading line breaks belong to the answer.
                self._over, self._at_start = True, False
                return "", self._answer()
        return self._reasoning()

    def close(self) -> tuple[str, str]:
        """End the output. Returns the remaining reasoning and answer."""
        held, self._held = self._held, ""
        if self._at_start:
            held = held.lstrip("\n")
        return (held, "") if self.in_reasoning else ("", held)

    def _reasoning(self) -> tuple[str, str]:
        end = self._held.find(self._markers.end)
        if end >= 0:
            reasoning = self._stripped(self._held[:end].rstrip("\n"))
            self._held = self._held[end + len(self._markers.end) :]
            self._over = self._at_start = True
            return reasoning, self._answer()
        certain = len(self._held) - overlap(self._held, self._markers.end)
        reasoning = self._held[:certain].rstrip("\n")
        self._held = self._held[len(reasoning) :]
        return self._stripped(reasoning), ""

    def _answer(self) -> str:
        held, self._held = self._held, ""
        return self._stripped(held)

    def _stripped(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text


class ReasoningCounter:
    """Counts the reasoning tokens of one output, up to and including its closing marker.

    It parses the text of each token by itself, because the text of an engine's delta may lag behind
    the delta's tokens.

    Args:
        markers, opened: as in ReasoningParser.
        tokenizer: spells the tokens.

    Attributes:
        count: reasoning tokens so far; 0 until the opening marker is complete.
    """

    def __init__(self, markers: ReasoningMarkers, opened: bool, tokenizer: Tokenizer) -> None:
        self.count = 0
        self._parser = ReasoningParser(markers, opened)
        self._token_text = tokenizer.token_text
        self._tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add generated token ids."""
        for token in tokens:
            if self._parser.in_answer:
                return
            was_inside = self._parser.in_reasoning
            self._parser.feed(self._token_text(token))
            self._tokens += 1
            if was_inside or self._parser.in_reasoning:
                self.count = self._tokens


_START = re.compile(r"\bstart\b")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def _rules(text: str) -> str:
    """The text of a grammar without its string literals."""
    return _STRING.sub('""', text)


def grammar_after_reasoning(
    grammar: Grammar, markers: ReasoningMarkers, special: Mapping[str, int]
) -> Grammar | None:
    """A grammar for reasoning and its closing marker, followed by an answer in `grammar`.

    Args:
        grammar: the grammar of the answer.
        markers: the markers around the reasoning; the opening one is part of the prompt.
        special: the tokenizer's special tokens, name -> id.

    Returns:
        None when the start rule of `grammar` cannot be renamed. `grammar` then has to apply from
        the first token.
    """
    if grammar.kind != "ebnf":
        answer = rule_of(grammar)
    elif grammar.text.startswith("start: ") and len(_START.findall(_rules(grammar.text))) == 1:
        answer = grammar.text.removeprefix("start: ")
    else:
        return None
    if markers.end in special:
        rule = f"reasoning: REASONING <[{special[markers.end]}]>"
    else:
        rule = f"reasoning[lazy]: REASONING {json.dumps(markers.end)}"
    lines = (
        "start: reasoning SPACE? reply",
        rule,
        r"REASONING: /(.|\n)*/",
        r"SPACE: /[ \r\n\t]+/",
    )
    return Grammar("ebnf", "\n".join((*lines, f"reply: {answer}")))
