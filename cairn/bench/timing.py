"""How long a call takes: replays of a CUDA graph on a GPU, the clock on a CPU.

Calls rotate over copies of their arguments that together are larger than the last cache, so that
what is measured is memory, as in a step, where other layers ran in between.
"""

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
"""Most copies of the arguments; arguments smaller than that stay in cache in a real step too."""
FEWEST = 2
"""Fewest copies: in a real step the next layer does not read what this one left in the cache."""
MEMORY = {"cuda": 8 << 30, "cpu": 1 << 30}
"""Bytes that all copies of a call's arguments may take."""
LASTING, GRAPH_CALLS = 0.01, 64
"""Seconds of work that a graph holds, and most calls: so long that its launch and a GPU that was
idle do not matter."""
REPEATS = (3, 20)
"""Fewest and most measurements that the median is taken of."""
SLOW = 0.25
"""One call of so many seconds is measurement enough."""
ENQUEUED, ROUNDS = 20, 5
"""Calls that the host enqueues while it is timed, fewer than a device has room for, and how often
it does."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured call.

    Attributes:
        seconds: of one call, median.
        how: "graph": replayed, so the host plays no part; "stream": launched one by one, because
            the call waits for the device or cannot be captured; "clock": on the CPU.
    """

    seconds: float
    how: str


def rotated(function: Callable[..., Any], arguments: Arguments, touched: int) -> list[Call]:
    """The call on as many copies of its arguments as exceed the last cache twice.

    Args:
        function: what is called.
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
    """Seconds of one of these calls, median of several passes over them.

    Args:
        calls: equal work on different memory.
        device: where they run.
        budget: seconds that the measurement may take, a few passes at least.
    """
    with torch.inference_mode():
        if not device.startswith("cuda"):
            return _clocked(calls, budget)
        seconds = _warmed_up(calls[0])
        if seconds > SLOW:
            return Timing(seconds, "stream")
        return _on_stream(calls, budget) if _waits(calls[0]) else _replayed(calls, budget)


def host_seconds(call: Call) -> float | None:
    """Seconds that the host takes for a call on a GPU by itself, one after the other, as eager code
    makes them: median. None for a call that waits for the device."""
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
    """GPU kernels that `work` launches, those of graphs it replays included."""
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
    """Seconds of a call after one that compiles what needs compiling."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _waits(call: Call) -> bool:
    """Whether the host waits for the device in this call."""
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
    """Events around the replays of a graph that holds the calls, again and again if they are short.

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
    """Calls of a graph, of so many seconds and on so many different arguments."""
    return max(different, min(GRAPH_CALLS, math.ceil(LASTING / once)))


def _on_stream(calls: Sequence[Call], budget: float) -> Timing:
    (once,) = _between_events(calls[0], 1)
    fitting = max(1, min(len(calls), int(budget / REPEATS[0] / once)))

    def all_of_them() -> None:
        for call in calls[:fitting]:
            call()

    return Timing(_median(all_of_them, fitting * once, budget) / fitting, "stream")


def _median(work: Call, expected: float, budget: float) -> float:
    """Seconds of `work`, which is expected to take about so many."""
    fewest, most = REPEATS
    repeats = max(fewest, min(most, int(budget / expected)))
    work()
    return statistics.median(_between_events(work, repeats))


def _between_events(work: Call, repeats: int) -> list[float]:
    """Seconds of each repeat, by events on the current stream."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(marks)]
