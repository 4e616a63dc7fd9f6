"""Requests of the load generator and their outcomes. Times are of `time.perf_counter`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a server.

    Attributes:
        prompt: text; the content of one user message when `chat`.
        input_len: tokens of the prompt as far as known.
        output_len: `max_tokens`.
        kind: name in a mix; outcomes are counted by it.
        chat: /v1/chat/completions instead of /v1/completions.
        stream: server-sent events; without it only the end-to-end time is known.
        n: continuations.
        stop: stop strings.
        ignore_eos: the end-of-sequence id does not end the output. Not an OpenAI field, but known
            to the engines of this field; sent only when True.
        temperature: 0 is greedy.
    """

    prompt: str
    input_len: int
    output_len: int
    kind: str = ""
    chat: bool = False
    stream: bool = True
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0

    @property
    def path(self) -> str:
        """URL path below /v1."""
        return "chat/completions" if self.chat else "completions"

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body, without fields at the API's defaults."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.output_len,
            "temperature": self.temperature,
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.n > 1:
            body["n"] = self.n
        if self.stop:
            body["stop"] = list(self.stop)
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


@dataclass(slots=True)
class Outcome:
    """Outcome of a request; filled while it runs.

    It does not hold the prompt: a soak of long prompts would keep them all.

    Attributes:
        kind: of the request.
        due: when it should have been sent.
        sent: when it was sent.
        ended: when its last byte came; 0 while it runs.
        stamps: arrivals of the first continuation's pieces of text.
        input_tokens, output_tokens: by the server's usage, or estimated where `counted` is False.
        cached_tokens: prompt tokens from the prefix cache; None where the server does not say.
        counted: the server's usage gave the token counts.
        text: the output, kept only until `output_tokens` is known.
        error: kind of failure such as "HTTP 429" or "timeout"; None: none.
        detail: the failure's text.
        aborted: the client left before the end.
    """

    kind: str = ""
    due: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    stamps: array[float] = field(default_factory=lambda: array("d"))
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted: bool = False
    text: str = ""
    error: str | None = None
    detail: str = ""
    aborted: bool = False

    @property
    def complete(self) -> bool:
        """Whether it ended without failure or cancellation."""
        return self.ended > 0.0 and self.error is None and not self.aborted

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None when none came or the answer was not streamed."""
        return self.stamps[0] - self.sent if self.stamps else None

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last byte."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces of text: the inter-token latencies."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an output of one token."""
        if not self.stamps or self.output_tokens < 2:
            return None
        return (self.ended - self.stamps[0]) / (self.output_tokens - 1)

    def fail(self, kind: str, detail: str = "") -> None:
        """Record the first failure; later ones are its consequences."""
        if self.error is None:
            self.error, self.detail = kind, " ".join(detail.split())[:300]
