"""A profile of the next steps: a table of the most expensive ops, and a trace."""

from __future__ import annotations

import gzip
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from cairn.errors import BadRequest

MAX_STEPS = 200
MAX_SECONDS = 300.0
TABLE_ROWS = 30


def recorder(*activities: ProfilerActivity) -> torch.profiler.profile:
    """A torch profiler that detaches from the GPU when it stops.

    CUPTI otherwise stays in the process, and to launch a CUDA graph takes several times as long
    from then on. Before CUDA 12.6 it could not be detached from a process with graphs.
    """
    cuda = torch.version.cuda
    if cuda is not None and tuple(int(n) for n in cuda.split(".")[:2]) >= (12, 6):
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
    return torch.profiler.profile(activities=activities, acc_events=True)


class StepProfile:
    """Records from its creation on.

    Args:
        steps: how many steps to record.
        seconds: recording ends after this time, whatever has run.

    Raises:
        BadRequest: a number out of range.
    """

    def __init__(self, steps: int = 10, seconds: float = 60.0) -> None:
        if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
            raise BadRequest(f"steps must be an integer in [1, {MAX_STEPS}], not {steps!r}")
        if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
            raise BadRequest(f"seconds must be in (0, {MAX_SECONDS:g}], not {seconds!r}")
        self._wanted = steps
        self._steps = 0
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = recorder(*activities)
        self._profile.start()

    @property
    def seconds_left(self) -> float:
        """Time until recording ends even if fewer steps have run."""
        return max(0.0, self._deadline - time.monotonic())

    def step(self) -> bool:
        """Report the end of a step; True if it was the last to record."""
        self._steps += 1
        return self._steps >= self._wanted or self.seconds_left == 0

    def finish(self) -> dict[str, Any]:
        """Stop recording.

        Returns:
            "steps" and "seconds" recorded, "table" (text, the ops that took longest), "trace" (a
            gzipped Chrome trace, bytes).
        """
        seconds = time.monotonic() - self._began
        self._profile.stop()
        on_gpu = ProfilerActivity.CUDA in self._profile.activities
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
        with tempfile.TemporaryDirectory(prefix="cairn-profile-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = gzip.compress(path.read_bytes(), compresslevel=5)
        return {"steps": self._steps, "seconds": seconds, "table": table, "trace": trace}
