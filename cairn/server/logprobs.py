"""Log-probabilities of the engine in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from cairn.engine.detokenizer import Detokenizer
from cairn.engine.messages import Position
from cairn.engine.tokenizer import Tokenizer
from cairn.server.protocol.chat import ChatLogprobs, TokenAlternative, TokenLogprob
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
    tokens: Sequence[int], positions: Sequence[Position], count: int, tokenizer: Tokenizer
) -> ChatLogprobs:
    """Entries of a chat choice, each with `count` alternatives."""
    content = []
    for token, position in zip(tokens, positions, strict=True):
        top = [_alternative(tokenizer, *pair) for pair in best(position, count)]
        chosen = _alternative(tokenizer, token, value_of(position, token))
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _alternative(tokenizer: Tokenizer, token: int, value: float) -> TokenAlternative:
    spelled = tokenizer.token_bytes(token)
    return TokenAlternative(spelled.decode(errors="replace"), value, list(spelled))


class LegacyLogprobs:
    """The four lists of a completion, text by text: they know where in the text they are.

    Args:
        tokenizer: None names tokens by their ids.
        prompt: ids before the text.
        begin: index of the text's first character.
        count: most likely tokens to report beside the one that stands there.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], begin: int, count: int
    ) -> None:
        self._name = cache(partial(_name, tokenizer))
        self._detokenizer: Detokenizer | None = tokenizer.detokenizer(prompt) if tokenizer else None
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
