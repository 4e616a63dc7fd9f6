import pytest

from cairn.engine.messages import Heartbeat, Stats
from cairn.engine.watchdog import TICK_SECONDS, Watchdog


class Time:
    """A fake clock that ticks the watchdog while it advances."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dog = Watchdog(stuck_seconds=4.0, step_limit=30.0, clock=lambda: self.now)
        self.dog.loading = False

    def pass_by(self, seconds: float, beat: float | None = None) -> str | None:
        """Advance some seconds, with a heartbeat of step age `beat` in each; returns the last
        verdict."""
        verdict = None
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            if beat is not None:
                self.dog.beat(Heartbeat(beat, Stats()))
            verdict = verdict or self.dog.tick()
        return verdict


@pytest.fixture
def time() -> Time:
    return Time()


def test_regular_heartbeats_are_well(time):
    assert time.pass_by(60, beat=0.0) is None
    assert time.dog.step_age == 0.0


def test_silence_is_stuck_within_five_seconds(time):
    time.pass_by(10, beat=0.0)
    assert time.pass_by(3.5) is None
    assert "no sign of life for 4 seconds" in time.pass_by(1.0)


def test_a_pause_of_the_watching_process_is_not_the_engines_fault(time):
    time.pass_by(10, beat=0.0)
    time.now += 3600
    assert time.dog.tick() is None
    assert time.pass_by(60, beat=0.0) is None


def test_loading_may_be_silent_for_long(time):
    time.dog.loading = True
    assert time.pass_by(60) is None
    assert time.dog.step_age == 0.0
    assert "no sign of life" in time.pass_by(61)


def test_a_step_that_takes_too_long_is_stuck(time):
    assert time.pass_by(1, beat=29.0) is None
    assert "more than 30 seconds" in time.pass_by(1, beat=30.1)


def test_the_step_age_counts_on_between_heartbeats_and_through_silence(time):
    time.dog.beat(Heartbeat(2.0, Stats()))
    time.now += 0.4
    assert time.dog.step_age == pytest.approx(2.4)
    time.dog.beat(Heartbeat(0.0, Stats()))
    time.now += 0.6
    assert time.dog.step_age == 0.0
    time.now += 2.0
    assert time.dog.step_age == pytest.approx(2.6)
