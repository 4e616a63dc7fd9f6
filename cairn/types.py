"""Types of the public API: sampling parameters, outputs, finish reasons.

Uses the standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, overload

from cairn.errors import BadRequest
from cairn.names import checked_keywords


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string was produced."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""
    ABORT = "abort"
    """The caller aborted the request."""
    ERROR = "error"
    """The engine failed while it served the request."""


GRAMMAR_KINDS = ("json_schema", "regex", "ebnf")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output. Raises BadRequest for an unknown kind or an empty text.

    Attributes:
        kind: "json_schema" (the schema as JSON; `{"type": "object"}` for any object), "regex"
            (the whole output matches) or "ebnf" (a grammar in Lark's or GBNF syntax).
        text: the schema, expression or grammar.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            known = ", ".join(GRAMMAR_KINDS)
            raise BadRequest(f"grammar kind is {self.kind!r}", f"Choose one of {known}")
        if not isinstance(self.text, str) or not self.text:
            raise BadRequest(f"grammar text must be a non-empty string, not {self.text!r}")


@checked_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Raises BadRequest for a value out of range.

    Attributes:
        n: number of independent outputs, >= 1.
        temperature: >= 0; 0 for greedy decoding.
        top_p: sample from the smallest set of tokens whose probabilities sum to at least this, in
            (0, 1]; 1 for all.
        top_k: sample from the k most likely tokens; 0 or -1 for all.
        min_p: drop tokens whose probability is below this share of the most likely token's, in
            [0, 1].
        seed: 64-bit integer. The same seed gives the same tokens, in a batch and alone.
        max_tokens: maximum number of generated tokens. None for as many as fit the context; 0 runs
            the prompt for its log-probabilities only.
        min_tokens: minimum number of tokens before a stop condition applies.
        stop: strings that end the output; not part of the text.
        stop_token_ids: token ids that end the output; not part of the text.
        ignore_eos: continue after the model's end-of-sequence ids.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        logprobs: number of alternatives to report per generated token; 0 for the sampled token
            only, -1 for the whole user vocabulary, None for no report.
        prompt_logprobs: the same for prompt tokens.
        presence_penalty: subtracted from the logit of every token already generated, in [-2, 2].
        frequency_penalty: subtracted from a token's logit for each time it was generated, in
            [-2, 2].
        repetition_penalty: divides positive logits of tokens in prompt and output, and multiplies
            negative ones; > 0.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        grammar: constraint on the output, or None.
        selection: report the pages that each generated token's query read (landmark models only).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    selection: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        _integer("n", self.n, low=1)
        _number("temperature", self.temperature, low=0.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _integer("top_k", self.top_k, low=-1)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=0)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, low=-1)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _boolean(name, getattr(self, name))
        _boolean("selection", self.selection)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise BadRequest(f"grammar must be a Grammar, not {self.grammar!r}")

    def _check_lists(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadRequest(f"stop must hold non-empty strings, not {text!r}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, low=0)
            _number(f"logit_bias[{token}]", bias, low=-100.0, high=100.0)

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens of prompt and output."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class KvTransferParams:
    """Parameters of disaggregated prefill, in vLLM's format.

    Attributes:
        do_remote_decode: keep the pages of the prompt for another engine. The response contains the
            parameters for that engine.
        do_remote_prefill: fetch the pages of the prompt from the engine that computed it. The other
            fields are those of its response.
        remote_engine_id: id of that engine.
        remote_host, remote_port: address at which it serves pages.
        remote_request_id: hexadecimal token that authorizes the transfer.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_request_id: str | None = None


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise BadRequest(f"{name} must be {bounds}, not {value}")


def _number(
    name: str, value: Any, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number, not {value!r}")
    too_low = value <= low if open_low else value < low
    if not math.isfinite(value) or too_low or value > high:
        left = "(" if open_low else "["
        right = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise BadRequest(f"{name} must be in {left}{low:g}, {right}, not {value}")


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be True or False, not {value!r}")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token over the user vocabulary.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token.
        decoded_token: its text, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TokenLogprobs(Mapping[int, Logprob]):
    """Alternatives at one position: token id -> Logprob, most likely first.

    The sampled token is always among them. Logprob objects are created on access, so that a whole
    vocabulary per token is stored as three flat sequences.

    Args:
        ids: sequence or array of token ids.
        values: log-probability of each.
        ranks: rank of each, from 1.
        decode: returns the text of a token id; None without a tokenizer.
    """

    __slots__ = ("_decode", "_ids", "_index", "_ranks", "_values")

    def __init__(
        self,
        ids: Any,
        values: Any,
        ranks: Any,
        decode: Callable[[int], str] | None = None,
    ) -> None:
        self._ids = ids
        self._values = values
        self._ranks = ranks
        self._decode = decode
        self._index: dict[int, int] | None = None

    def __getitem__(self, token: int) -> Logprob:
        if self._index is None:
            self._index = {int(t): i for i, t in enumerate(self._ids)}
        i = self._index[token]
        text = self._decode(token) if self._decode is not None else None
        return Logprob(float(self._values[i]), int(self._ranks[i]), text)

    def __iter__(self) -> Iterator[int]:
        return (int(t) for t in self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return repr(dict(self))

    @property
    def columns(self) -> tuple[Any, Any, Any]:
        """(ids, values, ranks), most likely first."""
        return self._ids, self._values, self._ranks


LISTED_BELOW = 256
"""Below this number of alternatives, a position's values are tuples: faster than arrays, and unlike
lists untracked by the garbage collector."""


class Alternatives(NamedTuple):
    """Log-probabilities reported at one position, most likely first.

    Attributes:
        chosen: log-probability of the sampled token.
        ids, values, ranks: sequences or arrays: token ids, log-probabilities and ranks (from 1) of
            the reported tokens, which include the sampled one.
    """

    chosen: float
    ids: Any
    values: Any
    ranks: Any


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities at n positions, as arrays.

    Attributes:
        ids: [n, k + 1], ids of the k most likely tokens, most likely first, and of the sampled one.
        values: [n, k + 1], their log-probabilities.
        ranks: [n], rank of the sampled token, from 1.
    """

    ids: Any
    values: Any
    ranks: Any

    def __len__(self) -> int:
        return len(self.ranks)

    def positions(self, begin: int = 0, end: int | None = None) -> Iterator[Alternatives]:
        """Yield the alternatives of positions `begin` to `end`."""
        ids, values = self.ids[begin:end], self.values[begin:end]
        k = ids.shape[1] - 1
        among = (ids[:, :k] == ids[:, k:]).any(axis=1).tolist()
        chosen = values[:, k].tolist()
        ranks: Sequence[int] = range(1, k + 1)
        keep: Callable[[Any], Any] = tuple
        if k < LISTED_BELOW:
            ids, values, ranks = ids.tolist(), values.tolist(), tuple(ranks)
        else:
            # Copy, so that keeping one position does not keep the arrays of all positions alive.
            keep = type(ids).copy
        lines = zip(ids, values, chosen, among, self.ranks[begin:end].tolist(), strict=True)
        for line, numbers, value, inside, rank in lines:
            if inside:
                yield Alternatives(value, keep(line[:k]), keep(numbers[:k]), ranks)
            else:
                yield Alternatives(value, keep(line), keep(numbers), (*ranks, rank))


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Log-probabilities of a prompt's tokens: one entry per token, created on access.

    Entries are None for the first token and for tokens that have not run.

    Args:
        length: number of tokens of the prompt.
        decode: returns the text of a token id; None without a tokenizer.
    """

    __slots__ = ("_begins", "_decode", "_end", "_length", "_parts")

    def __init__(self, length: int, decode: Callable[[int], str] | None = None) -> None:
        self._length = length
        self._decode = decode
        self._parts: list[LogprobColumns] = []
        self._begins: list[int] = []
        self._end = 1

    def put(self, first: int, columns: LogprobColumns) -> None:
        """Append entries for tokens first, first + 1, ...; `first` = 1 clears earlier entries."""
        if first == 1:
            self._parts, self._begins = [], []
        elif first != self._end:
            raise ValueError(f"entries from token {first} on do not follow token {self._end - 1}")
        self._parts.append(columns)
        self._begins.append(first)
        self._end = first + len(columns)

    @property
    def parts(self) -> tuple[LogprobColumns, ...]:
        """The columns of tokens 1, 2, ..., as appended."""
        return tuple(self._parts)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        at = range(self._length)[index]
        if not 0 < at < self._end:
            return None
        part = bisect_right(self._begins, at) - 1
        i = at - self._begins[part]
        [found] = self._parts[part].positions(i, i + 1)
        return TokenLogprobs(found.ids, found.values, found.ranks, self._decode)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    # Mutable, so not hashable, like a list; mypy wants __hash__ to be a method.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


MAX_SELECTED_PAGES = 64
"""Maximum number of pages per layer in a selection report, those with the largest weights."""


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """Pages that a query selected in a landmark layer.

    Attributes:
        layer: index of the layer.
        pages: logical page numbers, largest weight first; at most MAX_SELECTED_PAGES.
        weights: attention weight of each page, averaged over the query heads. The remaining weight
            is that of the window and, with softmax1, of the zero logit.
        window: attention weight of the window.
    """

    layer: int
    pages: tuple[int, ...]
    weights: tuple[float, ...]
    window: float


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        index: index of the output, 0 .. n-1.
        text: the decoded text; empty without a tokenizer.
        token_ids: generated user tokens, without landmarks.
        cumulative_logprob: sum over the generated tokens; None unless `logprobs` was requested.
        logprobs: one entry per generated token; None unless requested.
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: the stop string or stop id that ended it; None for end-of-sequence.
        selection: selected pages, one entry per generated token, with one item per landmark layer;
            None unless requested.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    selection: list[tuple[LayerSelection, ...]] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request with its outputs.

    Attributes:
        request_id: id of the request in the engine.
        prompt: text of the prompt, None for a prompt of token ids.
        prompt_token_ids: user tokens of the prompt.
        prompt_logprobs: one entry per prompt token, the first None; None unless requested.
        outputs: the n outputs.
        finished: whether all outputs have ended.
        num_cached_tokens: prompt tokens read from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
