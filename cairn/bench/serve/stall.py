"""`cairn bench stall`: how a long prompt and running streams slow each other down."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.bench.serve.client import Server, ServerAddress
from cairn.bench.serve.exchange import Outcome, Request
from cairn.bench.serve.lengths import Lengths, open_lengths
from cairn.bench.serve.load import Pace, drive
from cairn.bench.serve.progress import progress_bar
from cairn.bench.serve.report import Spread
from cairn.errors import BadConfig, CairnError

POLL_SECONDS = 0.02

Gap = tuple[float, float]
"""When a piece of text came, and the seconds since the piece before."""


@dataclass(frozen=True, slots=True)
class StallPlan:
    """Options of a stall measurement.

    Attributes:
        address: of the server.
        streams: requests that decode.
        stream_len: tokens of their prompts.
        stream_output: tokens they may generate; it must outlast the measurement.
        long_len: tokens of the long prompt.
        seconds_before: how long the streams are watched alone.
        target_ms: the server's --itl-target-ms, for the comparison; None: it has none.
        seed: of the prompts.
        tokenizer: folder that counts tokens; None: the server does.
    """

    address: ServerAddress
    streams: int = 8
    stream_len: int = 64
    stream_output: int = 8192
    long_len: int = 65536
    seconds_before: float = 10.0
    target_ms: float | None = None
    seed: int = 0
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        for name in ("streams", "stream_len", "stream_output", "long_len"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("seconds_before", "target_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadConfig(f"{name} must be above 0, not {value}")


@dataclass(frozen=True, slots=True)
class Prefill:
    """One run of the long prompt: when it was sent, time of its first token, computed tokens."""

    sent: float
    first: float
    tokens: int

    @property
    def seconds(self) -> float:
        """From sending to the first token."""
        return self.first - self.sent

    @property
    def speed(self) -> float:
        """Prompt tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class StallResult:
    """Result of a stall measurement.

    Attributes:
        model: name of the model.
        alone, beside: the long prompt without the streams (the faster of two) and with them.
        before, during: gaps of the streams while they run alone and during the prefill.
        target_ms: of the plan.
    """

    model: str
    alone: Prefill
    beside: Prefill
    before: list[Gap]
    during: list[Gap]
    target_ms: float | None

    @property
    def share(self) -> float:
        """Speed of the prefill beside the streams over its speed alone."""
        return self.beside.speed / self.alone.speed

    @property
    def itl(self) -> dict[str, Spread | None]:
        """Inter-token latencies of both times."""
        pairs = (("before", self.before), ("during", self.during))
        return {name: Spread.of(gap for _, gap in gaps) for name, gaps in pairs}

    @property
    def over_target(self) -> float | None:
        """p99 during the prefill over the target."""
        during = self.itl["during"]
        if during is None or self.target_ms is None:
            return None
        return during.p99 / self.target_ms

    def fields(self) -> dict[str, object]:
        """As a JSON object."""
        found: dict[str, object] = {}
        for name, spread in self.itl.items():
            found[f"itl_{name}_ms"] = None if spread is None else _of(spread)
        over = self.over_target
        return found | {
            "itl_target_ms": self.target_ms,
            "itl_p99_over_target": None if over is None else round(over, 3),
            "prefill_tokens": self.beside.tokens,
            "prefill_alone_s": round(self.alone.seconds, 3),
            "prefill_alone_tokens_per_s": round(self.alone.speed, 1),
            "prefill_beside_s": round(self.beside.seconds, 3),
            "prefill_beside_tokens_per_s": round(self.beside.speed, 1),
            "prefill_share": round(self.share, 3),
        }

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = []
        for name, spread in self.itl.items():
            if spread is not None:
                lines.append(
                    f"ITL {name:<7} p50 {spread.median:>9,.2f} ms  p99 {spread.p99:>9,.2f} ms  "
                    f"max {spread.max:>9,.2f} ms  of {spread.count:,}"
                )
        if self.over_target is not None:
            lines.append(f"p99 is {self.over_target:.2f} times the target {self.target_ms:g} ms")
        for name, prefill in (("alone", self.alone), ("beside", self.beside)):
            lines.append(
                f"prefill {name:<7} {prefill.tokens:>9,} tokens in {prefill.seconds:>8,.2f} s  "
                f"{prefill.speed:>9,.1f} tokens/s"
            )
        return [*lines, f"the prefill keeps {self.share:.0%} of its lone speed"]


async def run_stall(plan: StallPlan) -> StallResult:
    """Measure the long prompt alone, the streams alone, both at once, and the prompt again.

    Raises:
        BadConfig: no server, or no way to tell lengths.
        CairnError: a request failed, or a stream ended before the long prompt was loaded.
    """
    async with Server(plan.address) as server:
        lengths = await open_lengths(server, plan.tokenizer)
        note = "long prompt alone"
        began = time.perf_counter()
        async with progress_bar("stall", None, lambda: (time.perf_counter() - began, note)):
            # The first request may include one-time work of the server.
            await _prefill(server, await _prompt(plan, lengths, "warm", plan.stream_len))
            alone = await _prefill(server, await _prompt(plan, lengths, "alone", plan.long_len))
            streams = [
                await _prompt(plan, lengths, f"stream/{i}", plan.stream_len)
                for i in range(plan.streams)
            ]
            late = await _prompt(plan, lengths, "beside", plan.long_len)
            note = "streams and the long prompt"
            outcomes, calm, beside = await _both(plan, server, streams, late)
            note = "long prompt alone again"
            again = await _prefill(server, await _prompt(plan, lengths, "again", plan.long_len))
    # Use the faster one: the first long prompt may include one-time work of the server.
    alone = max(alone, again, key=lambda prefill: prefill.speed)
    before, during = split_gaps(outcomes, calm, beside)
    return StallResult(server.model, alone, beside, before, during, plan.target_ms)


def split_gaps(
    outcomes: Iterable[Outcome], calm: float, prefill: Prefill
) -> tuple[list[Gap], list[Gap]]:
    """Gaps of the streams before the prefill and during it.

    A gap counts as during the prefill if any part of it overlaps, because the longest gap often
    ends after the prefill.

    Args:
        outcomes: the streams.
        calm: when all of them ran; what came before is left out.
        prefill: of the long prompt.
    """
    before: list[Gap] = []
    during: list[Gap] = []
    for outcome in outcomes:
        for start, end in zip(outcome.stamps, outcome.stamps[1:], strict=False):
            if start < calm:
                continue
            if end <= prefill.sent:
                before.append((end, end - start))
            elif start < prefill.first:
                during.append((end, end - start))
    return before, during


async def _both(
    plan: StallPlan, server: Server, streams: Sequence[Request], late: Request
) -> tuple[list[Outcome], float, Prefill]:
    outcomes = [Outcome() for _ in streams]

    async def stream(index: int, _: float) -> None:
        await server.send(streams[index], outcomes[index])

    load = asyncio.create_task(drive(Pace(count=len(streams)), stream))
    try:
        await _until(outcomes, lambda x: bool(x.stamps))
        calm = time.perf_counter()
        await asyncio.sleep(plan.seconds_before)
        beside = await _prefill(server, late)
        # The prefill ends inside a gap of every stream; the gap's length is known when its next
        # text arrives.
        await _until(outcomes, lambda x: x.stamps[-1] > beside.first)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return outcomes, calm, beside


async def _until(outcomes: Sequence[Outcome], reached: Callable[[Outcome], bool]) -> None:
    """Wait until every stream has come so far.

    Raises:
        CairnError: one has ended.
    """
    while True:
        ended = [x for x in outcomes if x.ended]
        if ended:
            raise CairnError(
                f"{len(ended)} of {len(outcomes)} streams ended before the measurement did "
                f"({_why(ended[0])})",
                "Let them generate more: --stream-output-len",
            )
        if all(map(reached, outcomes)):
            return
        await asyncio.sleep(POLL_SECONDS)


def _of(spread: Spread) -> dict[str, float]:
    return {
        "count": spread.count,
        "p50": spread.median,
        "p99": spread.p99,
        "max": spread.max,
    }


async def _prompt(plan: StallPlan, lengths: Lengths, name: str, tokens: int) -> Request:
    text, found = await lengths.text(random.Random(f"{plan.seed}/{name}"), tokens)
    output = plan.stream_output if name.startswith("stream") else 1
    return Request(text, found, output, kind=name, ignore_eos=output > 1)


async def _prefill(server: Server, request: Request) -> Prefill:
    """Send a prompt for one token of output."""
    outcome = await server.send(request)
    if not outcome.complete:
        raise CairnError(f"the prompt of {request.input_len} tokens failed: {_why(outcome)}")
    first = outcome.stamps[0] if outcome.stamps else outcome.ended
    tokens = outcome.input_tokens - (outcome.cached_tokens or 0)
    return Prefill(outcome.sent, first, tokens)


def _why(outcome: Outcome) -> str:
    return f"{outcome.error}: {outcome.detail}" if outcome.error else "it ended early"
