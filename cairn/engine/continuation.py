"""The state of outputs that are being generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cairn.engine.output import OutputStream
from cairn.engine.request import Moments, Request
from cairn.errors import CairnError
from cairn.types import Alternatives, KvTransferParams, PromptLogprobs


@dataclass(slots=True, eq=False)
class Continuation:
    """One output of a request while it is being generated.

    Attributes:
        request: the scheduler's state of it.
        stream: tokens, text and stop conditions of the output.
        prompt_logprobs: None unless requested.
        moments: time stamps of its arrival, start, and so on.
        error: why it ended with the reason "error".
        status: HTTP status that goes with it.
        asked: which engine prefills and which decodes; None: this engine does both.
        transfer: set when it has ended: what the decoding engine needs.
    """

    request: Request
    stream: OutputStream
    prompt_logprobs: PromptLogprobs | None
    moments: Moments
    error: str | None = None
    status: int = CairnError.http_status
    asked: KvTransferParams | None = None
    transfer: KvTransferParams | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.stream.output.finish_reason is not None


@dataclass(slots=True, eq=False)
class SideBySide:
    """Requests of decode-only steps that need no other work than appending their token.

    Attributes:
        requests: in the scheduler's order.
        continuations: theirs, in the same order.
        streams: theirs.
        last: time of their last tokens; None: none yet.
        silent: none of them needs detokenisation per token.
        end_ids: ids that may end one of them.
        left: tokens until one of them reaches its maximum length.
    """

    requests: Sequence[Request | None]
    continuations: list[Continuation]
    streams: list[OutputStream]
    last: float | None = None
    silent: bool = field(init=False)
    end_ids: frozenset[int] = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.silent = all(stream.silent for stream in self.streams)
        self.end_ids = frozenset[int]().union(*{stream.end_ids for stream in self.streams})
        self.left = min(stream.left for stream in self.streams)

    def take(self, tokens: Sequence[int], logprobs: Mapping[int, Alternatives]) -> list[int]:
        """Append each request's token and its log-probabilities; returns the indices of those that
        end."""
        self.left -= 1
        if self.silent and self.left > 0 and self.end_ids.isdisjoint(tokens):
            for stream, token in zip(self.streams, tokens, strict=True):
                stream.ids.append(token)
            return []
        pushed = enumerate(zip(self.streams, tokens, strict=True))
        return [
            i for i, (stream, token) in pushed if stream.push(token, logprobs.get(i)) is not None
        ]
