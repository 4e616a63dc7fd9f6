"""Counters of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class HostTimes:
    """Host seconds of decode-only steps that follow decode-only steps: from one result to the next,
    minus the wait for the model (on the CPU: minus its run).

    Attributes:
        steps: number of such steps.
        plan: planning the step.
        launch: laying it out and launching it on the device.
        results: processing tokens, text and stop conditions.
        other: everything else, including the caller's work with the tokens.
    """

    steps: int = 0
    plan: float = 0.0
    launch: float = 0.0
    results: float = 0.0
    other: float = 0.0

    def add(self, plan: float, launch: float, results: float, other: float) -> None:
        """Count one more step."""
        self.steps += 1
        self.plan += plan
        self.launch += launch
        self.results += results
        self.other += other

    def __sub__(self, before: HostTimes) -> HostTimes:
        values = (getattr(self, f.name) - getattr(before, f.name) for f in fields(self))
        return HostTimes(*values)


@dataclass(slots=True)
class CoreStats:
    """Totals since the engine started. Seconds are wall clock.

    `prefill_tokens` and `decode_tokens` ran through the model; `generated_tokens` were sampled.
    `model_seconds` went into running the model or waiting for it, `host_seconds` into all else.
    `decode_stall_seconds` is what steps took beyond what the rows that decoded in them are expected
    to take alone: how long these waited for the prefill of others, counted once a step however many
    they were. `steady` is what decoding costs the host.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    model_seconds: float = 0.0
    host_seconds: float = 0.0
    decode_stall_seconds: float = 0.0
    steady: HostTimes = field(default_factory=HostTimes)
