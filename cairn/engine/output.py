"""Sampled ids -> text, stop conditions, and the output the user sees."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.engine.tokenizer import Detokenizer, Tokenizer
from cairn.runner.step import Alternatives
from cairn.types import CompletionOutput, FinishReason, SamplingParams, TokenLogprobs

PROMPT_TAIL = 5
"""Prompt tokens that give the first output token its context."""


class OutputStream:
    """One continuation while it grows.

    Args:
        output: what is filled in.
        params: stop conditions and logprobs wanted.
        eos_ids: ids that end the output without showing (empty when they are ignored).
        max_output: tokens that may be generated.
        tokenizer: None: no text.
        prompt: prompt tokens, for the context of the first piece.
    """

    def __init__(
        self,
        output: CompletionOutput,
        params: SamplingParams,
        eos_ids: Sequence[int],
        max_output: int,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
    ) -> None:
        self.output = output
        self.params = params
        self.eos_ids = frozenset(eos_ids)
        self.max_output = max_output
        self._tokenizer = tokenizer
        self._detokenizer = (
            Detokenizer(tokenizer, list(prompt[-PROMPT_TAIL:])) if tokenizer else None
        )
        self._shown = 0
        if params.logprobs is not None:
            output.logprobs = []
            output.cumulative_logprob = 0.0

    def push(self, token: int, logprobs: Alternatives | None) -> FinishReason | None:
        """Take one sampled token; returns the reason when it was the last."""
        output, params = self.output, self.params
        output.token_ids.append(token)
        if logprobs is not None and output.logprobs is not None:
            output.logprobs.append(token_logprobs(logprobs, self._tokenizer))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs.chosen
        may_stop = len(output.token_ids) >= params.min_tokens
        if may_stop and (token in self.eos_ids or token in params.stop_token_ids):
            output.stop_reason = None if token in self.eos_ids else token
            return self.finish(FinishReason.STOP)
        if self._detokenizer is not None:
            begin = len(output.text)
            output.text += self._detokenizer.push(token)
            if may_stop and self._cut_at_stop(begin):
                return self.finish(FinishReason.STOP)
        if len(output.token_ids) >= self.max_output:
            return self.finish(FinishReason.LENGTH)
        return None

    def finish(self, reason: FinishReason) -> FinishReason:
        """End the output: what waited for another token is shown now."""
        stopped_by_text = isinstance(self.output.stop_reason, str)
        if self._detokenizer is not None and not stopped_by_text:
            begin = len(self.output.text)
            self.output.text += self._detokenizer.flush()
            if reason is not FinishReason.ABORT and self._cut_at_stop(begin):
                reason = FinishReason.STOP
        self.output.finish_reason = reason.value
        return reason

    def take(self) -> str:
        """New text that no stop string can take back any more."""
        text = self.output.text
        end = len(text)
        if self.output.finish_reason is None:
            end -= held_back(text, self.params.stop)
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _cut_at_stop(self, begin: int) -> bool:
        """Cut the text at the first stop string that ends in text[begin:]."""
        text = self.output.text
        if len(text) == begin:
            return False
        found = [
            (at, stop)
            for stop in self.params.stop
            if (at := text.find(stop, max(0, begin - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        self.output.text = text[:at]
        self.output.stop_reason = stop
        return True


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


def token_logprobs(entry: Alternatives, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """The runner's alternatives as the user's mapping."""
    decode = tokenizer.token_text if tokenizer is not None else None
    return TokenLogprobs(entry.ids, entry.values, entry.ranks, decode)
