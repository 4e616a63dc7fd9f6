"""Fault injection for tests.

An engine injects the faults that CAIRN_FAULT names if CAIRN_ALLOW_FAULTS is 1; with CAIRN_FAULT
alone it refuses to start, so that no variable left in an environment makes a serving engine fail.

CAIRN_FAULT is "stall:SECONDS@STEP" (the step takes that much longer), "raise@STEP" (it raises) or
"die@STEP" (the process is killed), or several of these separated by commas. Steps count from 1.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cairn.errors import BadConfig
from cairn.runner.executor import Executor, PassingExecutor
from cairn.runner.step import Launched, StepPlan

ENVIRONMENT_VARIABLE = "CAIRN_FAULT"
ALLOWING_VARIABLE = "CAIRN_ALLOW_FAULTS"


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure: what happens in which step; `seconds` of a stall."""

    kind: str
    step: int
    seconds: float = 0.0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The failures that the text names. Raises BadConfig for any other form."""
    faults = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(?:(raise|die)|stall:(\d+(?:\.\d+)?))@(\d+)", part)
        if match is None:
            raise BadConfig(
                f"{ENVIRONMENT_VARIABLE} has {part!r}",
                "Write stall:SECONDS@STEP, raise@STEP or die@STEP",
            )
        faults.append(Fault(match[1] or "stall", int(match[3]), float(match[2] or 0)))
    return tuple(faults)


def faults_of(environment: Mapping[str, str]) -> tuple[Fault, ...]:
    """The failures that an engine with these environment variables injects.

    Raises:
        BadConfig: failures are named but not allowed, or named in another form.
    """
    text = environment.get(ENVIRONMENT_VARIABLE, "")
    if text and environment.get(ALLOWING_VARIABLE) != "1":
        raise BadConfig(
            f"{ENVIRONMENT_VARIABLE} is {text!r}, which makes the engine fail on purpose",
            f"Unset it; a test of failures sets {ALLOWING_VARIABLE}=1 as well",
        )
    return parse_faults(text)


class FaultyExecutor(PassingExecutor):
    """Runs plans on another executor, with failures at chosen steps."""

    def __init__(self, inner: Executor, faults: tuple[Fault, ...]) -> None:
        super().__init__(inner)
        self._faults = faults
        self._step = 0

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step, or fail as this step is to fail. Raises RuntimeError for "raise"."""
        self._step += 1
        for fault in self._faults:
            if fault.step != self._step:
                continue
            if fault.kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "raise":
                raise RuntimeError(
                    f"{ENVIRONMENT_VARIABLE} asked for a failure of step {fault.step}"
                )
            time.sleep(fault.seconds)
        return self._inner.launch(plan)
