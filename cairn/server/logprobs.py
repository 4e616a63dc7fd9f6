"""Log-probabilities of the engine in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

from msgspec import UNSET, UnsetType

from cairn.engine.detokenizer import Detokenizer
from cairn.engine.messages import Position, Positions
from cairn.engine.tokenizer import Tokenizer
from cairn.server.protocol.chat import ChatLogprobs, TokenAlternative, TokenLogprob
from cairn.server.protocol.common import PromptScore, ScoredToken
from cairn.server.protocol.completions import CompletionLogprobs

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent, as in OpenAI's API."""


def value_of(position: Position, token: int) -> float:
    """Log-probability of the token that stands at a position."""
    return max(position.values[position.ids.index(token)], LOWEST)


def best(position: Position, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens of a position with their log-probabilities."""
    entries = zip(position.ids, position.values, position.ranks, strict=True)
    return [(token, max(value, LOWEST)) for token, value, rank in entries if rank <= count]


def chat_logprobs(
    tokens: Sequence[int],
    positions: Sequence[Position],
    count: int,
    tokenizer: Tokenizer,
    by_id: bool = False,
) -> ChatLogprobs:
    """Entries of a chat choice, each with `count` alternatives; `by_id`: tokens are named by their
    ids."""
    content = []
    for token, position in zip(tokens, positions, strict=True):
        top = [_alternative(tokenizer, *pair, by_id) for pair in best(position, count)]
        chosen = _alternative(tokenizer, token, value_of(position, token), by_id)
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _alternative(tokenizer: Tokenizer, token: int, value: float, by_id: bool) -> TokenAlternative:
    spelled = tokenizer.token_bytes(token)
    name = _name(None, token) if by_id else spelled.decode(errors="replace")
    return TokenAlternative(name, value, list(spelled))


def prompt_scores(
    tokens: Sequence[int], parts: Sequence[Positions], count: int, tokenizer: Tokenizer | None
) -> list[PromptScore]:
    """Scores of a prompt's tokens in vLLM's form: `count` most likely ones and the token itself."""
    scores: list[PromptScore] = [None]
    for token, position in zip(tokens[1:], chain.from_iterable(parts), strict=True):
        entries = zip(position.ids, position.values, position.ranks, strict=True)
        scores.append(
            {
                other: ScoredToken(
                    max(value, LOWEST), rank, tokenizer.token_text(other) if tokenizer else None
                )
                for other, value, rank in entries
                if rank <= count or other == token
            }
        )
    return scores


class LegacyLogprobs:
    """The four lists of a completion, text by text: they know where in the text they are.

    Args:
        tokenizer: None names tokens by their ids.
        prompt: ids before the text.
        begin: index of the text's first character.
        count: most likely tokens to report beside the one that stands there.
        by_id: tokens are named by their ids all the same.
        special: the text shows special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        begin: int,
        count: int,
        by_id: bool = False,
        special: bool = False,
    ) -> None:
        self._name = cache(partial(_name, None if by_id else tokenizer))
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(prompt, special)
        self._at = begin
        self._count = count

    def take(
        self, tokens: Sequence[int], positions: Sequence[Position | None]
    ) -> CompletionLogprobs:
        """Entries of the next tokens; a position without numbers gets nulls."""
        lists = CompletionLogprobs([], [], [], [])
        for token, position in zip(tokens, positions, strict=True):
            lists.tokens.append(self._name(token))
            lists.text_offset.append(self._at)
            if position is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
            else:
                lists.token_logprobs.append(value_of(position, token))
                lists.top_logprobs.append(self._top(position, token))
            if self._detokenizer is not None:
                self._at += len(self._detokenizer.push(token))
        return lists

    def _top(self, position: Position, token: int) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, value in (*best(position, self._count), (token, value_of(position, token))):
            name = self._name(other)
            # Two ids may decode to the same text; report the likelier one.
            top[name] = max(value, top.get(name, LOWEST))
        return top


def _name(tokenizer: Tokenizer | None, token: int) -> str:
    if tokenizer is None:
        return f"token_id:{token}"
    spelled = tokenizer.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def joined_ids(parts: Sequence[Any]) -> list[int] | UnsetType:
    """Token ids of a choice from those of its parts."""
    lists = [part.token_ids for part in parts if part.token_ids is not UNSET]
    return [int(token) for ids in lists for token in ids] if lists else UNSET
