"""Sampled ids -> text, stop conditions, and the output the user sees."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cairn.engine.stops import StopSearch
from cairn.engine.tokenizer import Tokenizer
from cairn.types import (
    Alternatives,
    CompletionOutput,
    FinishReason,
    LayerSelection,
    SamplingParams,
    TokenLogprobs,
)


class OutputStream:
    """One continuation while it grows.

    Args:
        output: the output to fill in.
        params: stop conditions and logprobs wanted.
        eos_ids: ids that end the output without showing (empty when they are ignored).
        max_output: tokens that may be generated; 0: the first token ends the output and is no part
            of it.
        tokenizer: None: no text.
        prompt: prompt tokens that the text continues.

    Attributes:
        ids: the tokens so far.
        end_ids: those that may end the output.
        reports: something is reported of every token.
    """

    # __slots__: every step visits the streams of all rows, so their fields are kept close together.
    __slots__ = (
        "_detokenizer",
        "_shown",
        "_stops",
        "_tokenizer",
        "end_ids",
        "eos_ids",
        "ids",
        "max_output",
        "output",
        "params",
        "reports",
    )

    def __init__(
        self,
        output: CompletionOutput,
        params: SamplingParams,
        eos_ids: Collection[int],
        max_output: int,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
    ) -> None:
        self.output = output
        self.ids = output.token_ids
        self.params = params
        self.eos_ids = frozenset(eos_ids)
        self.max_output = max_output
        # Mostly the same set for all streams.
        more = params.stop_token_ids
        self.end_ids = self.eos_ids.union(more) if more else self.eos_ids
        self.reports = params.logprobs is not None or params.selection
        self._tokenizer = tokenizer
        self._detokenizer = self._stops = None
        if tokenizer is not None:
            shows_all = not params.skip_special_tokens
            self._detokenizer = tokenizer.detokenizer(prompt, shows_all)
            if params.stop:
                hidden = {} if shows_all else tokenizer.special_texts
                self._stops = StopSearch(params.stop, hidden)
        self._shown = 0
        if params.logprobs is not None:
            output.logprobs = []
            output.cumulative_logprob = 0.0
        if params.selection:
            output.selection = []

    @property
    def silent(self) -> bool:
        """Whether a token that does not end the output only needs to be appended."""
        return self._detokenizer is None and not self.reports

    @property
    def left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.max_output - len(self.ids)

    def push(
        self,
        token: int,
        logprobs: Alternatives | None = None,
        selection: tuple[LayerSelection, ...] = (),
        complete: bool = False,
    ) -> FinishReason | None:
        """Take one sampled token; returns the reason when it was the last. `complete`: it is,
        since its grammar lets nothing follow."""
        if self.max_output == 0:
            return self.finish(FinishReason.LENGTH)
        ids = self.ids
        ids.append(token)
        if self.reports:
            self._report(logprobs, selection)
        if token in self.end_ids and len(ids) >= self.params.min_tokens:
            self.output.stop_reason = None if token in self.eos_ids else token
            if self.params.include_stop_str_in_output and self._detokenizer is not None:
                self.output.text += self._detokenizer.push(token)
            return self.finish(FinishReason.STOP)
        if self._detokenizer is not None:
            piece = self._detokenizer.push(token)
            may_stop = len(ids) >= self.params.min_tokens
            if piece and self._append(piece, may_stop):
                return self.finish(FinishReason.STOP)
            if self._stops is not None and self._pass_special(token, may_stop):
                return self.finish(FinishReason.STOP)
        if complete:
            return self.finish(FinishReason.STOP)
        if len(ids) >= self.max_output:
            return self.finish(FinishReason.LENGTH)
        return None

    def _report(self, logprobs: Alternatives | None, selection: tuple[LayerSelection, ...]) -> None:
        """Keep what was asked for about a token."""
        output = self.output
        if output.selection is not None:
            output.selection.append(selection)
        if logprobs is not None and output.logprobs is not None:
            chosen, ids, values, ranks = logprobs
            decode = None if self._tokenizer is None else self._tokenizer.token_text
            output.logprobs.append(TokenLogprobs(ids, values, ranks, decode))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + chosen

    def finish(self, reason: FinishReason) -> FinishReason:
        """End the output and flush text that was held back."""
        stopped_by_text = isinstance(self.output.stop_reason, str)
        if self._detokenizer is not None and not stopped_by_text:
            may_stop = reason in (FinishReason.STOP, FinishReason.LENGTH)
            if self._append(self._detokenizer.flush(), may_stop):
                reason = FinishReason.STOP
        self.output.finish_reason = reason.value
        return reason

    def take(self) -> str:
        """New text that no stop string can remove any more."""
        text, begin = self.output.text, self._shown
        end = len(text)
        if self._stops is not None and self.output.finish_reason is None:
            end -= self._stops.held
        if end <= begin:
            return ""
        self._shown = end
        return text[begin:end]

    def _append(self, piece: str, may_stop: bool) -> bool:
        """Add a piece of text, up to the first stop string that ends in it (the longest of those
        that end there): the cut is the same wherever the borders between the tokens are."""
        if not piece:
            return False
        text = self.output.text
        # CPython appends to a string in place only if nothing else refers to it.
        self.output.text = ""
        begin = len(text)
        text += piece
        found = None if self._stops is None else self._stops.feed(piece, may_stop)
        if found is not None:
            kept = 0 if self.params.include_stop_str_in_output else found.shown
            text = text[: begin + found.end - kept]
            self.output.stop_reason = found.stop
        self.output.text = text
        return found is not None

    def _pass_special(self, token: int, may_stop: bool) -> bool:
        """Search for stop strings at a special token, which the text leaves out."""
        assert self._stops is not None
        found = self._stops.feed_special(token, may_stop)
        if found is None:
            return False
        if not self.params.include_stop_str_in_output:
            self.output.text = self.output.text[: len(self.output.text) - found.shown]
        self.output.stop_reason = found.stop
        return True
