"""Judges by heartbeats whether the engine process is alive and making progress. No torch here."""

from __future__ import annotations

import time
from collections.abc import Callable

from cairn.engine.messages import HEARTBEAT_SECONDS, Heartbeat

TICK_SECONDS = 0.25
"""How often `Watchdog.tick` is to be called."""

LOADING_SECONDS = 120.0
"""Seconds without a heartbeat that are allowed while the model loads: loading a large library can
block every thread of a process."""


class Watchdog:
    """Follows heartbeats and says when the engine is stuck.

    Silence is counted in the watchdog's own ticks, so that a pause of the process it lives in (a
    suspended machine, a blocked event loop) is not blamed on the engine.

    Args:
        stuck_seconds: silence that means stuck.
        step_limit: seconds that one step may take.
        clock: gives seconds; tests pass their own.
    """

    def __init__(
        self,
        stuck_seconds: float,
        step_limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stuck_seconds = stuck_seconds
        self.step_limit = step_limit
        self.loading = True
        self._clock = clock
        self._silence = 0.0
        self._last_tick = self._last_beat = clock()
        self._step_age = 0.0

    def beat(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat."""
        self._last_beat = self._clock()
        self._silence = 0.0
        self._step_age = heartbeat.step_age

    @property
    def step_age(self) -> float:
        """Seconds since the step in flight began, 0 when none runs; silence counts as a step."""
        since = self._clock() - self._last_beat
        if self._step_age > 0.0:
            return self._step_age + since
        return since if since > 3 * HEARTBEAT_SECONDS and not self.loading else 0.0

    def tick(self) -> str | None:
        """Count the time since the last tick; returns why the engine is stuck, None if it is not.

        Call it every TICK_SECONDS.
        """
        now = self._clock()
        self._silence += min(now - self._last_tick, 2 * TICK_SECONDS)
        self._last_tick = now
        limit = max(self.stuck_seconds, LOADING_SECONDS) if self.loading else self.stuck_seconds
        if self._silence > limit:
            return f"the engine process gave no sign of life for {limit:g} seconds"
        if self._step_age > self.step_limit:
            return f"a step of the engine has run for more than {self.step_limit:g} seconds"
        return None
