"""Converts the engine's log-probabilities to the formats of the chat and completions APIs."""

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


def chosen_logprob(position: Position, token: int) -> float:
    """Log-probability of `token` at a position."""
    return max(position.values[position.ids.index(token)], LOWEST)


def best(position: Position, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens at a position, each with its log-probability."""
    entries = zip(position.ids, position.values, position.ranks, strict=True)
    return [(token, max(value, LOWEST)) for token, value, rank in entries if rank <= count]


def chat_logprobs(
    tokens: Sequence[int],
    positions: Sequence[Position],
    count: int,
    tokenizer: Tokenizer,
    by_id: bool = False,
) -> ChatLogprobs:
    """The `logprobs` of a chat choice.

    Args:
        tokens: generated token ids.
        positions: log-probabilities at each of them.
        count: number of alternatives to report per token.
        tokenizer: spells tokens.
        by_id: name tokens by id, as `token_id:5`.
    """
    content = []
    for token, position in zip(tokens, positions, strict=True):
        top = [_alternative(tokenizer, *pair, by_id) for pair in best(position, count)]
        chosen = _alternative(tokenizer, token, chosen_logprob(position, token), by_id)
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _alternative(tokenizer: Tokenizer, token: int, value: float, by_id: bool) -> TokenAlternative:
    spelled = tokenizer.token_bytes(token)
    name = _name(None, token) if by_id else spelled.decode(errors="replace")
    return TokenAlternative(name, value, list(spelled))


def prompt_scores(
    tokens: Sequence[int], parts: Sequence[Positions], count: int, tokenizer: Tokenizer | None
) -> list[PromptScore]:
    """The `prompt_logprobs` of a response, in vLLM's format.

    Each entry has the `count` most likely tokens and the prompt's own token.
    """
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
    """Converts log-probabilities to the four lists of a completion, and tracks text offsets.

    Args:
        tokenizer: spells tokens; None names them by id.
        prompt: token ids before the text.
        begin: offset of the text's first character.
        count: number of alternatives to report per token.
        by_id: name tokens by id although there is a tokenizer.
        special: the text includes special tokens.
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
        """The lists for the next tokens. A position of None becomes null."""
        lists = CompletionLogprobs([], [], [], [])
        for token, position in zip(tokens, positions, strict=True):
            lists.tokens.append(self._name(token))
            lists.text_offset.append(self._at)
            if position is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
            else:
                lists.token_logprobs.append(chosen_logprob(position, token))
                lists.top_logprobs.append(self._top(position, token))
            if self._detokenizer is not None:
                self._at += len(self._detokenizer.push(token))
        return lists

    def _top(self, position: Position, token: int) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, value in (
            *best(position, self._count),
            (token, chosen_logprob(position, token)),
        ):
            name = self._name(other)
            # If two ids decode to the same text, report the likelier one.
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
    """Concatenate the token ids of a choice's parts; UNSET if they have none."""
    lists = [part.token_ids for part in parts if part.token_ids is not UNSET]
    return [int(token) for ids in lists for token in ids] if lists else UNSET
