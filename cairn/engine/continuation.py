"""Outputs while the engine works on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cairn.engine.output import OutputStream
from cairn.engine.request import Moments, Request
from cairn.errors import CairnError
from cairn.types import Alternatives, KvTransferParams, PromptLogprobs


@dataclass(slots=True, eq=False)
class Continuation:
    """One output of a request while the engine works on it.

    Attributes:
        request: the scheduler's side.
        stream: the user's side: tokens, text, stop conditions.
        prompt_logprobs: None unless wanted.
        moments: when it arrived, started, and so on.
        error: why it ended with the reason "error".
        status: HTTP status that goes with it.
        asked: who computes the prompt and who goes on; None: this engine does both.
        transfer: once it has ended: what the engine that goes on needs.
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
        """Nothing more will come."""
        return self.stream.output.finish_reason is not None


@dataclass(slots=True, eq=False)
class SideBySide:
    """Requests of steps that only decode, none of them with anything to do but take its token.

    Attributes:
        requests: as the scheduler gives them.
        continuations: theirs, in the same order.
        streams: theirs.
        last: when they took their last tokens; None: not yet.
        silent: none of them has a text that grows with its tokens.
        end_ids: ids that may end one of them.
        left: tokens until one of them has all it may have.
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
        """Give each its token, and what is reported of it; indices of those that end with it."""
        self.left -= 1
        if self.silent and self.left > 0 and self.end_ids.isdisjoint(tokens):
            for stream, token in zip(self.streams, tokens, strict=True):
                stream.ids.append(token)
            return []
        pushed = enumerate(zip(self.streams, tokens, strict=True))
        return [
            i for i, (stream, token) in pushed if stream.push(token, logprobs.get(i)) is not None
        ]
