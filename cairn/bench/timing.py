"""Timing of calls: CUDA graph replays on a GPU, wall clock on a CPU.

Calls rotate over copies of their arguments that together exceed the last-level cache, so that
arguments come from memory, as in a step, where other layers run in between."""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from cairn.engine.profile import recorder
from cairn.ops.testing import Arguments

Call = Callable[[], Any]

CPU_CACHE = 64 << 20
COPIES = {"cuda": 32, "cpu": 8}
"""Most copies of the arguments; small arguments stay in the cache in a real step too."""
FEWEST = 2
"""Least number of copies, because in a real step the next layer has other arguments."""
MEMORY = {"cuda": 8 << 30, "cpu": 1 << 30}
"""Most bytes of all copies of the arguments."""
LASTING, GRAPH_CALLS = 0.01, 64
"""Seconds of work per graph, and most calls per graph; long enough that launch latency and the
clocks of an idle GPU do not matter."""
REPEATS = (3, 20)
"""Least and most measurements; the median is recorded."""
SLOW = 0.25
"""Calls that take longer (seconds) are measured once."""
ENQUEUED, ROUNDS = 20, 5
"""Calls that are enqueued while host time is measured (fewer than the launch queue holds), and
number of measurements."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured call.

    Attributes:
        seconds: of one call, median.
        how: "graph": CUDA graph replays, without host time; "stream": eager launches, for calls
            that synchronize or cannot be captured; "clock": wall clock on a CPU.
    """

    seconds: float
    how: str


def rotated(function: Callable[..., Any], arguments: Arguments, touched: int) -> list[Call]:
    """Calls on copies of the arguments, which together exceed twice the last-level cache.

    Args:
        function: the function.
        arguments: of the first call.
        touched: bytes that a call reads and writes.
    """
    tensors = [v for v in (*arguments.args, *arguments.kwargs.values()) if isinstance(v, Tensor)]
    device = tensors[0].device
    cache = CPU_CACHE
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    held = max(1, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    wanted = max(FEWEST, math.ceil(2 * cache / max(1, touched)))
    count = max(1, min(wanted, COPIES[device.type], MEMORY[device.type] // held))
    bundles = [arguments, *(arguments.clone() for _ in range(count - 1))]
    return [_bound(function, bundle) for bundle in bundles]


def measure_calls(calls: Sequence[Call], device: str, budget: float) -> Timing:
    """Time of one call: median of several passes over the calls.

    Args:
        calls: the same work on different memory.
        device: where they run.
        budget: seconds for the measurement; at least a few passes are made.
    """
    with torch.inference_mode():
        if not device.startswith("cuda"):
            return _clocked(calls, budget)
        seconds = _warmed_up(calls[0])
        if seconds > SLOW:
            return Timing(seconds, "stream")
        return _on_stream(calls, budget) if _waits(calls[0]) else _replayed(calls, budget)


def host_seconds(call: Call) -> float | None:
    """Host seconds of an eager call on a GPU, median over consecutive calls. None for calls that
    synchronize."""
    with torch.inference_mode():
        if _warmed_up(call) > SLOW or _waits(call):
            return None
        seconds = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(ENQUEUED):
                call()
            seconds.append((time.perf_counter() - began) / ENQUEUED)
        torch.cuda.synchronize()
        return statistics.median(seconds)


def kernels(work: Call) -> int:
    """Number of GPU kernels that `work` launches, including those of replayed graphs."""
    torch.cuda.synchronize()
    with recorder(ProfilerActivity.CUDA) as recorded:
        work()
        torch.cuda.synchronize()
    on_gpu = (event for event in recorded.events() if "CUDA" in str(event.device_type))
    return sum(1 for event in on_gpu if not event.name.startswith(("Memcpy", "Memset")))


def _bound(function: Callable[..., Any], arguments: Arguments) -> Call:
    return lambda: function(*arguments.args, **arguments.kwargs)


def _clocked(calls: Sequence[Call], budget: float) -> Timing:
    calls[0]()
    seconds: list[float] = []
    ends = time.perf_counter() + budget
    while len(seconds) < REPEATS[0] or (len(seconds) < REPEATS[1] and time.perf_counter() < ends):
        began = time.perf_counter()
        for call in calls:
            call()
        seconds.append((time.perf_counter() - began) / len(calls))
    return Timing(statistics.median(seconds), "clock")


def _warmed_up(call: Call) -> float:
    """Seconds of a call after a warm-up call, which may compile kernels."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _waits(call: Call) -> bool:
    """Whether a call synchronizes with the device."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return False


def _replayed(calls: Sequence[Call], budget: float) -> Timing:
    """Time replays of a graph of the calls, repeated if they are short, with events.

    Raises RuntimeError if the calls cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        (once,) = _between_events(calls[0], 1)
    torch.cuda.current_stream().wait_stream(stream)
    fitting = max(1, min(len(calls), int(budget / REPEATS[0] / once)))
    count = held(once, fitting)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for position in range(count):
            calls[position % fitting]()
    return Timing(_median(graph.replay, count * once, budget) / count, "graph")


def held(once: float, different: int) -> int:
    """Number of calls per graph: `once` seconds each, on `different` sets of arguments."""
    return max(different, min(GRAPH_CALLS, math.ceil(LASTING / once)))


def _on_stream(calls: Sequence[Call], budget: float) -> Timing:
    (once,) = _between_events(calls[0], 1)
    fitting = max(1, min(len(calls), int(budget / REPEATS[0] / once)))

    def all_of_them() -> None:
        for call in calls[:fitting]:
            call()

    return Timing(_median(all_of_them, fitting * once, budget) / fitting, "stream")


def _median(work: Call, expected: float, budget: float) -> float:
    """Median seconds of `work`, which is expected to take `expected` seconds."""
    fewest, most = REPEATS
    repeats = max(fewest, min(most, int(budget / expected)))
    work()
    return statistics.median(_between_events(work, repeats))


def _between_events(work: Call, repeats: int) -> list[float]:
    """Seconds of each repetition, by events on the current stream."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(marks)]
